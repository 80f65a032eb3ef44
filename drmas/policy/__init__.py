"""Policies: Megatron models with their optimisers, loaded from and exported to Hugging Face folders.

Importing this package prepares the host (`host_platform.install`), because that must happen before the first import of
megatron anywhere in the process; every module here may then import megatron at its top. Called by drmas.runtime only.
"""

from drmas.policy import host_platform

host_platform.install()
