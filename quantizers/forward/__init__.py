"""The forward pass, one decoder layer at a time: dequantized weights, and hidden states.

Nothing here changes a weight.
"""
