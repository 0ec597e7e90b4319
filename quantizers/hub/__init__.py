"""A finished checkpoint on the Hugging Face Hub: what is sent, and what the Hub then holds."""
