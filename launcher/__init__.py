"""Composition: the `segue` command, local processes, Ray pools."""
