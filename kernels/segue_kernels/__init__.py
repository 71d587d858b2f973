"""Triton kernels of Segue, each beside its eager twin (plain torch) that defines what is right."""
