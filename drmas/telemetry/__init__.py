"""Metrics, sinks, console and report."""
