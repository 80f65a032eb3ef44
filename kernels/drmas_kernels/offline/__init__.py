"""What can be known and done about the Triton kernels without a GPU: `python -m drmas_kernels.offline COMMAND`.

`command` is the command, `compilation` compiles specs the way a launch would, `measure` and `machine_code` read what came out,
`budgets` compares it with `budgets.json`, `cubins` writes files for a launcher without Python. No training run imports this.
"""
