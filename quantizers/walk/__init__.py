"""The one walk over a checkpoint's decoder layers, from which a run, `eval`, coverage and all others pull."""
