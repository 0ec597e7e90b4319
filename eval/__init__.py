"""Measuring a checkpoint against its source. Import as `from eval.perplexity import …`."""
