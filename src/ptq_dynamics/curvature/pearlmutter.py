"""Hessian-vector products of GPTNeoX in closed form: the directional derivative of the backward pass.

Pearlmutter (1994), "Fast exact multiplication by the Hessian": H v = d/dr ∇L(θ + r v) at r = 0. Differentiating twice by
autograd runs the forward and the backward pass again for every v. Written out, everything that does not depend on v is
computed once per batch of tokens (``record``), and a product (``product``) is what is left: six matrix products per
weight matrix instead of nine, no exponentials. ``benchmarks/curvature.py`` measures it; tests hold it to autograd in
float64.

Names: ``x̄`` (here ``x_bar``) is ∂L/∂x, ``dx`` the derivative of x along v, ``dx_bar`` that of x̄.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor

from ..models.neox import Params, Rotation, Shape, head_name

STRIPS = 4  # of queries; none sees a key beyond its strip's end, so 3/8 of the square is never computed


@dataclass
class Norm:
    """A layer norm without gain: x = (h - mean) r. Rows are tokens."""

    x: Tensor  # [n, width]
    r: Tensor  # [n, 1], 1 / standard deviation
    x_bar: Tensor | None = None
    h_bar: Tensor | None = None  # this norm's own part of h̄
    along: Tensor | None = None  # mean of x x̄, [n, 1]


@dataclass
class Block:
    """What one block's forward and backward pass leave behind; n = batch · length rows, b·h = batch · heads."""

    norm: Norm
    x_attention: Tensor  # after gain and bias, [n, width]
    x_mlp: Tensor
    q: Tensor  # [b·h, length, head dim], rotated, scaled by head dim^-½
    k: Tensor
    v: Tensor
    p: list[Tensor]  # attention by strips of queries, each [b·h, queries, keys]
    o: Tensor  # [n, width]
    u: Tensor  # before GELU, [n, mlp]
    g: Tensor  # GELU(u)
    h_bar: Tensor | None = None  # of the block's output, which is also ā and m̄
    w: list[Tensor] | None = None  # p̄ - Σ p p̄
    s_bar: list[Tensor] | None = None
    o_bar: Tensor | None = None  # [b·h, length, head dim]
    y_bar: Tensor | None = None  # of the output of query_key_value, [n, 3 width]
    u_bar: Tensor | None = None
    slope: Tensor | None = None  # GELU'(u)
    bend: Tensor | None = None  # ḡ GELU''(u); replaces u
    x_attention_bar: Tensor | None = None
    x_mlp_bar: Tensor | None = None


@dataclass
class Record:
    """All of one batch that does not depend on the vector."""

    ids: Tensor  # int64 [n]
    batch: int
    rotation: Rotation  # [length, rotated / 2] each
    blocks: list[Block]
    norm: Norm
    x: Tensor  # input of the head, [n, width]
    p: Tensor  # next-token probabilities [n, vocab]
    z_bar: Tensor  # (p - onehot) · share
    x_bar: Tensor
    share: float  # weight of one prediction in the mean loss
    gradient: dict[str, Tensor]  # of this batch's part of the mean, by parameter name

    @property
    def nbytes(self) -> int:
        """Memory held, in bytes."""
        parts = [self, self.norm, *self.blocks, *(b.norm for b in self.blocks)]
        held = [getattr(part, f.name) for part in parts for f in fields(part)]
        held += [strip for b in self.blocks for strips in (b.p, b.w, b.s_bar) for strip in strips]
        return sum(t.nbytes for t in [*held, *self.gradient.values()] if isinstance(t, Tensor))


class Pass:
    """Forward and backward pass of one architecture with one set of weights.

    Args:
        params: weights by their transformers names, all in one floating-point dtype.
        names: the parameters that derivatives are taken by.
    """

    def __init__(self, shape: Shape, params: Params, names: tuple[str, ...]) -> None:
        self.shape, self.params, self.names = shape, params, frozenset(names)
        self.head = head_name(params)
        # memory traffic is a third of a product on a CPU; a GPU maps ``product`` over vectors (torch.vmap), which
        # knows no overwriting
        self.in_place = params[self.head].device.type == "cpu"

    def _normalise(self, h: Tensor) -> Norm:
        centred = h - h.mean(-1, keepdim=True)
        r = (centred.square().mean(-1, keepdim=True) + self.shape.norm_eps).rsqrt()
        return Norm(x=centred * r, r=r)

    def _affine(self, x: Tensor, name: str) -> Tensor:
        return torch.addcmul(self.params[name + ".bias"], x, self.params[name + ".weight"])

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.params[name + ".weight"], self.params[name + ".bias"])

    def _rotation(self, length: int, like: Tensor) -> Rotation:
        cos, sin = self.shape.rotation(length, like.device)
        half = (self.shape.rotated + 1) // 2
        return cos[:, :half].to(like.dtype), sin[:, :half].to(like.dtype)

    def _rotate_(self, x: Tensor, rotation: Rotation, back: bool = False) -> None:
        """Rotate the first dims of [..., length, head dim], in place."""
        cos, sin = rotation
        half = cos.shape[-1]
        x1, x2 = x[..., :half], x[..., half : 2 * half]
        if back:
            sin = -sin
        r1, r2 = x1 * cos - x2 * sin, x2 * cos + x1 * sin
        x1.copy_(r1)
        x2.copy_(r2)

    def _split(self, y: Tensor, batch: int, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        """[n, 3 width] -> q (rotated, scaled), k (rotated), v, each [b·h, length, head dim]."""
        heads = self.shape.heads
        hd = self.shape.width // heads
        y = y.view(batch, -1, heads, 3, hd).permute(3, 0, 2, 1, 4).reshape(3, batch * heads, -1, hd)
        self._rotate_(y[:2], rotation)
        y[0].mul_(hd**-0.5)
        return y[0], y[1], y[2]

    def _unsplit(self, q: Tensor, k: Tensor, v: Tensor, batch: int, rotation: Rotation) -> Tensor:
        """The transpose of ``_split``."""
        heads = self.shape.heads
        hd = self.shape.width // heads
        y = torch.stack([q, k, v])
        y[0].mul_(hd**-0.5)
        self._rotate_(y[:2], rotation, back=True)
        y = y.view(3, batch, heads, -1, hd).permute(1, 3, 2, 0, 4)
        return y.reshape(-1, 3 * self.shape.width)

    def _heads(self, x: Tensor, batch: int) -> Tensor:
        """[n, width] -> [b·h, length, head dim]."""
        heads = self.shape.heads
        return (
            x.view(batch, -1, heads, self.shape.width // heads)
            .transpose(1, 2)
            .reshape(batch * heads, -1, self.shape.width // heads)
        )

    def _joined(self, x: Tensor, batch: int) -> Tensor:
        """[b·h, length, head dim] -> [n, width]."""
        return x.view(batch, self.shape.heads, -1, x.shape[-1]).transpose(1, 2).reshape(-1, self.shape.width)

    def _forward(self, ids: Tensor, blocks: list[Block] | None) -> tuple[Norm, Tensor, Tensor]:
        """The last norm, the head's input and the logits; each block's leavings are added to ``blocks``."""
        batch, length = ids.shape
        h = self.params["gpt_neox.embed_in.weight"][ids.flatten()]
        rotation = self._rotation(length, h)
        future = torch.full((length, length), -math.inf, device=h.device, dtype=h.dtype).triu(1)
        strips = _strips(length)
        for i in range(self.shape.layers):
            at = f"gpt_neox.layers.{i}."
            norm = self._normalise(h)
            x_attention = self._affine(norm.x, at + "input_layernorm")
            x_mlp = self._affine(norm.x, at + "post_attention_layernorm")
            q, k, v = self._split(
                self._linear(x_attention, at + "attention.query_key_value"), batch, rotation
            )
            p = [(q[:, s] @ k[:, : s.stop].mT + future[s, : s.stop]).softmax(-1) for s in strips]
            o = self._joined(torch.cat([a @ v[:, : a.shape[-1]] for a in p], 1), batch)
            u = self._linear(x_mlp, at + "mlp.dense_h_to_4h")
            g = F.gelu(u)
            h = h + self._linear(o, at + "attention.dense") + self._linear(g, at + "mlp.dense_4h_to_h")
            if blocks is not None:
                blocks.append(Block(norm, x_attention, x_mlp, q, k, v, p, o, u, g))
        norm = self._normalise(h)
        x = self._affine(norm.x, "gpt_neox.final_layer_norm")
        return norm, x, F.linear(x, self.params[self.head])

    def losses(self, tokens: Tensor) -> Tensor:
        """Cross-entropy of each next token, nats, [batch · length], of ``tokens`` [batch, length + 1]."""
        _, _, z = self._forward(tokens[:, :-1], None)
        return F.cross_entropy(z, tokens[:, 1:].flatten(), reduction="none")

    # -- backward, once per batch ----------------------------------------------------------------------------

    def record(self, tokens: Tensor, share: float) -> Record:
        """Forward and backward pass of ``tokens`` [batch, length + 1]; ``share``: weight of one prediction."""
        ids, labels = tokens[:, :-1], tokens[:, 1:].flatten()
        batch = len(tokens)
        blocks: list[Block] = []
        norm, x, z = self._forward(ids, blocks)
        rotation = self._rotation(ids.shape[1], x)
        p = z.softmax(-1)
        z_bar = p * share
        z_bar[torch.arange(len(p), device=p.device), labels] -= share
        x_bar = z_bar @ self.params[self.head]
        out: dict[str, Tensor] = {}
        if self.head in self.names:
            out[self.head] = z_bar.mT @ x
        h_bar = self._norm_back(norm, [("gpt_neox.final_layer_norm", x_bar)], out)
        for i in reversed(range(self.shape.layers)):
            at, b = f"gpt_neox.layers.{i}.", blocks[i]
            b.h_bar = h_bar
            g_bar = self._linear_back(at + "mlp.dense_4h_to_h", b.g, h_bar, out)
            cdf = 0.5 * (1 + torch.erf(b.u * 0.5**0.5))
            pdf = torch.exp(-0.5 * b.u.square()) * (2 * math.pi) ** -0.5
            b.slope = cdf + b.u * pdf
            b.bend = g_bar * pdf * (2 - b.u.square())
            b.u = b.bend  # u itself is not needed any more
            b.u_bar = g_bar * b.slope
            b.x_mlp_bar = self._linear_back(at + "mlp.dense_h_to_4h", b.x_mlp, b.u_bar, out)
            b.o_bar = self._heads(self._linear_back(at + "attention.dense", b.o, h_bar, out), batch)
            strips = _strips(ids.shape[1])
            p_bar = [b.o_bar[:, s] @ b.v[:, : s.stop].mT for s in strips]
            b.w = [pb - (a * pb).sum(-1, keepdim=True) for a, pb in zip(b.p, p_bar, strict=True)]
            b.s_bar = [a * w for a, w in zip(b.p, b.w, strict=True)]
            q_bar = torch.cat([sb @ b.k[:, : s.stop] for s, sb in zip(strips, b.s_bar, strict=True)], 1)
            k_bar = _overlaid([sb.mT @ b.q[:, s] for s, sb in zip(strips, b.s_bar, strict=True)])
            v_bar = _overlaid([a.mT @ b.o_bar[:, s] for s, a in zip(strips, b.p, strict=True)])
            b.y_bar = self._unsplit(q_bar, k_bar, v_bar, batch, rotation)
            b.x_attention_bar = self._linear_back(
                at + "attention.query_key_value", b.x_attention, b.y_bar, out
            )
            h_bar = h_bar + self._norm_back(
                b.norm,
                [
                    (at + "input_layernorm", b.x_attention_bar),
                    (at + "post_attention_layernorm", b.x_mlp_bar),
                ],
                out,
            )
        embed = "gpt_neox.embed_in.weight"
        if embed in self.names:
            out[embed] = torch.zeros_like(self.params[embed]).index_add(0, ids.flatten(), h_bar)
        return Record(ids.flatten(), batch, rotation, blocks, norm, x, p, z_bar, x_bar, share, out)

    def _linear_back(self, name: str, x: Tensor, y_bar: Tensor, out: dict[str, Tensor]) -> Tensor:
        if name + ".weight" in self.names:
            out[name + ".weight"] = y_bar.mT @ x
        if name + ".bias" in self.names:
            out[name + ".bias"] = y_bar.sum(0)
        return y_bar @ self.params[name + ".weight"]

    def _norm_back(self, norm: Norm, readers: list[tuple[str, Tensor]], out: dict[str, Tensor]) -> Tensor:
        for name, y_bar in readers:
            if name + ".weight" in self.names:
                out[name + ".weight"] = (y_bar * norm.x).sum(0)
            if name + ".bias" in self.names:
                out[name + ".bias"] = y_bar.sum(0)
        norm.x_bar = sum(y_bar * self.params[name + ".weight"] for name, y_bar in readers)
        norm.along = (norm.x * norm.x_bar).mean(-1, keepdim=True)
        norm.h_bar = norm.r * (norm.x_bar - norm.x_bar.mean(-1, keepdim=True) - norm.x * norm.along)
        return norm.h_bar

    # -- the derivative of both along v, once per vector -----------------------------------------------------

    def product(self, record: Record, v: Params) -> dict[str, Tensor]:
        """This batch's part of H v; ``v`` and the result hold the parameters of ``names``."""
        out: dict[str, Tensor] = {}
        embed, final = "gpt_neox.embed_in.weight", "gpt_neox.final_layer_norm"
        dh = v[embed][record.ids] if embed in v else torch.zeros_like(record.x)
        forward = []
        strips = _strips(len(record.ids) // record.batch)
        for i, b in enumerate(record.blocks):
            at = f"gpt_neox.layers.{i}."
            dx, pull = self._norm_along(b.norm, dh)
            dx_attention = self._affine_along(b.norm, dx, at + "input_layernorm", v)
            dx_mlp = self._affine_along(b.norm, dx, at + "post_attention_layernorm", v)
            dy = self._linear_along(at + "attention.query_key_value", b.x_attention, dx_attention, v)
            dq, dk, dv = self._split(dy, record.batch, record.rotation)
            dp, do = [], []
            both_q, both_k = torch.cat([dq, b.q], -1), torch.cat([b.k, dk], -1)
            for s, p in zip(strips, b.p, strict=True):
                ds = both_q[:, s] @ both_k[:, : s.stop].mT  # dq kᵀ + q dkᵀ
                dp.append(self._softmax_along(p, ds))
                do.append(self._plus(dp[-1] @ b.v[:, : s.stop], p, dv[:, : s.stop]))
            do = self._joined(torch.cat(do, 1), record.batch)
            du = self._linear_along(at + "mlp.dense_h_to_4h", b.x_mlp, dx_mlp, v)
            dg = b.slope * du
            dh = dh + self._linear_along(at + "attention.dense", b.o, do, v)
            dh = dh + self._linear_along(at + "mlp.dense_4h_to_h", b.g, dg, v)
            forward.append((dx, pull, dx_attention, dx_mlp, dq, dk, dv, dp, do, du, dg))
        dx_last, pull_last = self._norm_along(record.norm, dh)
        dx = self._affine_along(record.norm, dx_last, final, v)

        head = self.params[self.head]
        dz = self._linear_both(record.x, dx, head, v.get(self.head))
        dz_bar = self._softmax_along(record.p, dz)  # without the share, which is cheaper to put in below
        dx_bar = (dz_bar @ head) * record.share
        if self.head in v:
            dx_bar = self._plus(dx_bar, record.z_bar, v[self.head])
            out[self.head] = self._plus(record.z_bar.mT @ dx, dz_bar.mT, record.x, record.share)
        dh_bar = self._norm_back_along(
            record.norm, dx_last, pull_last, [(final, record.x_bar, dx_bar)], v, out
        )
        for i in reversed(range(self.shape.layers)):
            at, b = f"gpt_neox.layers.{i}.", record.blocks[i]
            dx, pull, dx_attention, dx_mlp, dq, dk, dv, dp, do, du, dg = forward[i]
            dg_bar = self._linear_back_along(at + "mlp.dense_4h_to_h", b.g, dg, b.h_bar, dh_bar, v, out)
            du_bar = self._plus_times(self._times(dg_bar, b.slope), b.bend, du)
            dx_mlp_bar = self._linear_back_along(
                at + "mlp.dense_h_to_4h", b.x_mlp, dx_mlp, b.u_bar, du_bar, v, out
            )
            do_bar = self._linear_back_along(at + "attention.dense", b.o, do, b.h_bar, dh_bar, v, out)
            do_bar = self._heads(do_bar, record.batch)
            both_o, both_v = torch.cat([do_bar, b.o_bar], -1), torch.cat([b.v, dv], -1)
            dq_bar, dk_bar, dv_bar = [], [], []
            for s, p, dp_s, w, s_bar in zip(strips, b.p, dp, b.w, b.s_bar, strict=True):
                keys = slice(0, s.stop)
                dp_bar = both_o[:, s] @ both_v[:, keys].mT
                ds_bar = self._plus_times(dp_s * w, p, dp_bar)
                ds_bar = self._plus_times(ds_bar, p, ds_bar.sum(-1, keepdim=True), -1)
                dq_bar.append(self._plus(ds_bar @ b.k[:, keys], s_bar, dk[:, keys]))
                dk_bar.append(self._plus(ds_bar.mT @ b.q[:, s], s_bar.mT, dq[:, s]))
                dv_bar.append(self._plus(dp_s.mT @ b.o_bar[:, s], p.mT, do_bar[:, s]))
            dy_bar = self._unsplit(
                torch.cat(dq_bar, 1), _overlaid(dk_bar), _overlaid(dv_bar), record.batch, record.rotation
            )
            dx_attention_bar = self._linear_back_along(
                at + "attention.query_key_value", b.x_attention, dx_attention, b.y_bar, dy_bar, v, out
            )
            readers = [
                (at + "input_layernorm", b.x_attention_bar, dx_attention_bar),
                (at + "post_attention_layernorm", b.x_mlp_bar, dx_mlp_bar),
            ]
            dh_bar = dh_bar + self._norm_back_along(b.norm, dx, pull, readers, v, out)
        if embed in v:
            out[embed] = torch.zeros_like(self.params[embed]).index_add(0, record.ids, dh_bar)
        return out

    def _norm_along(self, norm: Norm, dh: Tensor) -> tuple[Tensor, Tensor]:
        """dx, and the mean of x dh, which is -dr / r²."""
        pull = (norm.x * dh).mean(-1, keepdim=True)
        return norm.r * (dh - dh.mean(-1, keepdim=True) - norm.x * pull), pull

    def _affine_along(self, norm: Norm, dx: Tensor, name: str, v: Params) -> Tensor:
        out = dx * self.params[name + ".weight"]
        if name + ".weight" in v:
            out = out + norm.x * v[name + ".weight"]
        return out + v[name + ".bias"] if name + ".bias" in v else out

    def _linear_along(self, name: str, x: Tensor, dx: Tensor, v: Params) -> Tensor:
        return self._linear_both(
            x, dx, self.params[name + ".weight"], v.get(name + ".weight"), v.get(name + ".bias")
        )

    def _linear_both(
        self, x: Tensor, dx: Tensor, w: Tensor, dw: Tensor | None, db: Tensor | None = None
    ) -> Tensor:
        """dx Wᵀ + x dWᵀ + db."""
        if dw is None:
            return F.linear(dx, w, db)
        if len(w) > w.shape[1]:  # a wide result is written once: one product of twice the depth
            return F.linear(torch.cat([dx, x], -1), torch.cat([w, dw], -1), db)
        return self._plus(F.linear(dx, w, db), x, dw.mT)

    def _linear_back_along(
        self,
        name: str,
        x: Tensor,
        dx: Tensor,
        y_bar: Tensor,
        dy_bar: Tensor,
        v: Params,
        out: dict[str, Tensor],
    ) -> Tensor:
        dx_bar = dy_bar @ self.params[name + ".weight"]
        if name + ".bias" in v:
            out[name + ".bias"] = dy_bar.sum(0)
        if name + ".weight" in v:
            out[name + ".weight"] = self._plus(dy_bar.mT @ x, y_bar.mT, dx)
            dx_bar = self._plus(dx_bar, y_bar, v[name + ".weight"])
        return dx_bar

    def _norm_back_along(
        self,
        norm: Norm,
        dx: Tensor,
        pull: Tensor,
        readers: list[tuple[str, Tensor, Tensor]],
        v: Params,
        out: dict[str, Tensor],
    ) -> Tensor:
        dx_bar = 0
        for name, y_bar, dy_bar in readers:
            dx_bar = dx_bar + dy_bar * self.params[name + ".weight"]
            if name + ".weight" in v:
                dx_bar = dx_bar + y_bar * v[name + ".weight"]
                out[name + ".weight"] = (dy_bar * norm.x + y_bar * dx).sum(0)
            if name + ".bias" in v:
                out[name + ".bias"] = dy_bar.sum(0)
        both = (norm.x * dx_bar + dx * norm.x_bar).mean(-1, keepdim=True)
        turned = dx_bar - dx_bar.mean(-1, keepdim=True) - dx * norm.along - norm.x * both
        return norm.r * (turned - pull * norm.h_bar)

    def _softmax_along(self, p: Tensor, ds: Tensor) -> Tensor:
        """Derivative of p = softmax(s) over the last dimension, p ds - p Σ p ds; may overwrite ds."""
        dp = self._times(ds, p)
        return self._plus_times(dp, p, dp.sum(-1, keepdim=True), -1)

    def _times(self, a: Tensor, b: Tensor) -> Tensor:
        """a b, entry by entry; may overwrite a."""
        return torch.mul(a, b, out=a if self.in_place else None)

    def _plus(self, a: Tensor, b: Tensor, c: Tensor, factor: float = 1) -> Tensor:
        """a + factor · b c, matrices or stacks of them; may overwrite a."""
        add = torch.addmm if a.ndim == 2 else torch.baddbmm
        return add(a, b, c, alpha=factor, out=a if self.in_place else None)

    def _plus_times(self, a: Tensor, b: Tensor, c: Tensor, factor: float = 1) -> Tensor:
        """a + factor · b c, entry by entry; may overwrite a."""
        return torch.addcmul(a, b, c, value=factor, out=a if self.in_place else None)


def _strips(length: int) -> list[slice]:
    """Rows of queries that are handled together."""
    rows = -(-length // STRIPS)
    return [slice(i, min(i + rows, length)) for i in range(0, length, rows)]


def _overlaid(parts: list[Tensor]) -> Tensor:
    """Sum of [b·h, keys, head dim] over strips; each covers the first keys, the last one all."""
    total = parts[-1]
    for part in parts[:-1]:
        total[:, : part.shape[1]] += part
    return total
