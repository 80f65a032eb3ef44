"""Retrieval: corpora, indices, a server of them, its client, the `search` tool of agents, and scoring of short answers."""
