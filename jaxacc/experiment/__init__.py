"""The experiment runner behind `jaxacc train`: config, data, models, checkpoints, records, sheet.

Needs the extra `[run]`; `import jaxacc` does not import it.
"""
