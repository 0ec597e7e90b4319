"""Publishes a finished checkpoint on the Hugging Face Hub: checks it, uploads it, and compares what the Hub holds."""
