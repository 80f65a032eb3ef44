"""Engines and the collector that runs episodes on them."""
