"""Model families as data: one YAML file each, and the code that reads and checks them.

A new family is a file here; code that names a family belongs nowhere.
"""
