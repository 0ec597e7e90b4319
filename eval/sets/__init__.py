"""Calibration sets compared by the outputs that they give: estimates, verdicts, and figures of them."""
