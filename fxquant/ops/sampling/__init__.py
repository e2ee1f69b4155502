"""Resizing, and reading images at computed positions."""
