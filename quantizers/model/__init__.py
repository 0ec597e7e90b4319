"""The forward pass of one decoder layer at a time, and the activations between layers."""
