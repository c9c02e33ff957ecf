"""Handwritten digits, classifiers of them, and streams of queries about them."""
