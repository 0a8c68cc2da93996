"""Benchmarks, comparisons, proofs and tunings that the page starts."""
