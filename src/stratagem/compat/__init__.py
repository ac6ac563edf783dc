"""Other libraries' names for what Stratagem does: `from stratagem.compat import tensorflow as tf`."""
