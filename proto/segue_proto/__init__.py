"""Protobuf API of Segue; the generated modules in v1/ are committed (`make proto`)."""
