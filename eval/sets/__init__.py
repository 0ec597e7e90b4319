"""Calibration sets compared by the outputs that they give: estimates that cover draws and texts, and figures of them."""
