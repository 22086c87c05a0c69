from __future__ import annotations

import pytest

from ptq_dynamics.core.config import load
from ptq_dynamics.core.errors import UserError
from ptq_dynamics.quantization.spec import QuantSpec


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"bits": 1}, "key 'bits': must be 2 to 8, got 1"),
        ({"bits": 9}, "key 'bits': must be 2 to 8, got 9"),
        ({"bits": 3.5}, "key 'bits'"),
        ({"group_size": 0}, "key 'group_size': must be -1 (one group per row) or at least 1, got 0"),
        ({"group_size": -2}, "key 'group_size': must be -1"),
        ({"damping": 0.0}, "key 'damping': must be above 0 and at most 1"),
        ({"damping": -0.01}, "key 'damping': must be above 0"),
        ({"damping": 2.0}, "key 'damping': must be above 0 and at most 1"),
        ({"block_size": 0}, "key 'block_size': must be at least 1, got 0"),
        ({"method": "gtpq"}, "key 'method': Input should be 'rtn', 'gptq', 'gptqmodel', "),
        ({"method": "nf4", "bits": 3}, "nf4 has 4 bits, not 3"),
        ({"method": "int8"}, "int8 has 8 bits, not 4"),
        ({"method": "awq", "rotation": "hadamard"}, "rotation goes with rtn and gptq, not with awq"),
        ({"precision": "bfloat16"}, "key 'precision': Input should be 'float32' or 'float64'"),
        ({"group": 64}, "unknown key 'group'; did you mean 'group_size'?"),
    ],
)
def test_bad_values_are_told_with_field_and_range(data, says):
    with pytest.raises(UserError) as e:
        load(QuantSpec, data, "params.yaml: quantizers")
    message = str(e.value)
    assert message.startswith("params.yaml: quantizers: ") and says in message and "\n" not in message


@pytest.mark.parametrize(
    ("spec", "label"),
    [
        (QuantSpec(bits=4, group_size=64), "gptq-4bit-g64"),
        (QuantSpec(bits=3, group_size=64, rotation="hadamard"), "gptq-3bit-g64-hadamard"),
        (QuantSpec(method="nf4", group_size=64), "nf4-4bit-g64"),
        (QuantSpec(method="auto-gptq", act_order=True), "auto-gptq-4bit-g128-act"),
        (QuantSpec(method="rtn", bits=3, group_size=-1, act_order=True), "rtn-3bit-row"),
        (QuantSpec(bits=2, group_size=32, symmetric=False, act_order=True), "gptq-2bit-g32-asym-act"),
        (
            QuantSpec(damping=0.05, true_sequential=True, precision="float64"),
            "gptq-4bit-g128-seq-damp0.05-float64",
        ),
    ],
)
def test_label_names_what_differs_from_the_defaults(spec, label):
    assert spec.label == label
