"""Starting the tasks of a job: on this machine, on several, or through an engine that places them.

Import the parts by name. Nothing here uses JAX or Keras.
"""
