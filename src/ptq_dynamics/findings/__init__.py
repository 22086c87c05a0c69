"""Tables to statistics, figures and verdicts: one module per finding."""
