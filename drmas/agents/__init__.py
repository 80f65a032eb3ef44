"""Agents, teams and how text becomes tokens."""
