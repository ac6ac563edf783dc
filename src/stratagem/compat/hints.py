"""What to write instead of the TensorFlow names that are not in the namespace.

A hint holds for the name and all names below it. Names without one get `keras.ops.<name>` or
`jax.numpy.<name>` where these exist.
"""

from __future__ import annotations

HINTS = {
    # Strategies and their parts.
    "distribute": "The names of tf.distribute that are here are those of the package stratagem.",
    "tpu": "Leave it out: JAX sets a TPU up by itself; jax.devices('tpu') lists its cores.",
    # Devices.
    "config.threading": "Use the environment variables of XLA, such as XLA_FLAGS.",
    "config.optimizer": "Use jax.jit and XLA_FLAGS; XLA always optimizes.",
    "config.experimental.enable_tensor_float_32_execution": "Use jax.default_matmul_precision.",
    "config.experimental.enable_op_determinism": "Use XLA_FLAGS=--xla_gpu_deterministic_ops=true.",
    "config.experimental.get_memory_info": "Use jax.devices()[0].memory_stats().",
    # Input.
    "data.TFRecordDataset": "Use grain.experimental.TFRecordIterDataset, and pass it where a "
    "tf.data.Dataset goes.",
    "data.TextLineDataset": "Use tf.data.Dataset.from_generator over an open file.",
    "data.experimental.service": "Use grain.DataLoader with worker_count, which starts processes.",
    "data.experimental": "Use Grain, whose datasets Stratagem takes wherever a "
    "tf.data.Dataset goes.",
    "data": "Use tf.data.Dataset with another method, or a Grain dataset, which Stratagem takes "
    "wherever a tf.data.Dataset goes.",
    "io.gfile": "Use pathlib, or etils.epath for the file systems of clouds.",
    "io": "Use pathlib for files; for TFRecords, a package such as array_record or tfrecord.",
    "image": "Use keras.ops.image, or the preprocessing layers of keras.layers.",
    "strings": "Use Python strings in a map function, or keras.layers.TextVectorization.",
    "lookup": "Use keras.layers.StringLookup or IntegerLookup, or a Python dict in a map function.",
    "feature_column": "Use keras.utils.FeatureSpace, or keras.layers.Embedding and "
    "CategoryEncoding.",
    "ragged": "Use padded tensors and a mask; JAX has no ragged ones.",
    "RaggedTensor": "Use padded tensors and a mask; JAX has no ragged ones.",
    "sparse": "Use jax.experimental.sparse, or tf.IndexedSlices for gradients.",
    "SparseTensor": "Use jax.experimental.sparse, or tf.IndexedSlices for gradients.",
    "TensorArray": "Use a Python list and tf.stack, or jax.lax.scan.",
    "TensorShape": "Use a tuple: shapes are tuples here, and x.shape[0] is an int.",
    # Programs.
    "autograph": "Use tf.cond and tf.while_loop; Python's `if` on a tensor is not converted.",
    "control_dependencies": "Leave it out: writes to variables happen in the order of the program.",
    "group": "Leave it out: writes to variables happen in the order of the program.",
    "no_op": "Use None.",
    "py_function": "Use jax.pure_callback.",
    "numpy_function": "Use jax.pure_callback.",
    "custom_gradient": "Use jax.custom_vjp.",
    "recompute_grad": "Use jax.checkpoint.",
    "gradients": "Use tf.GradientTape.",
    "hessians": "Use jax.hessian.",
    "autodiff": "Use jax.jvp for forward mode.",
    "vectorized_map": "Use jax.vmap.",
    "scan": "Use jax.lax.scan.",
    "foldl": "Use jax.lax.scan.",
    "name_scope": "Use jax.named_scope.",
    "Graph": "Use @tf.function: there are no graphs to build by hand.",
    "Session": "Call the function: there are no sessions.",
    "placeholder": "Use a function's argument.",
    "init_scope": "Leave it out: variables are created outside the compiled program anyway.",
    "Operation": "Use jax.make_jaxpr(fn)(x) to look at a program.",
    "compat": "Port the program to TensorFlow 2 first: the names of version 1 are not here.",
    "estimator": "Use tf.keras.Model and fit.",
    "contrib": "Use keras and stratagem: TensorFlow itself dropped it in version 2.",
    "raw_ops": "Use keras.ops or jax.lax.",
    "errors.InvalidArgumentError": "Use ValueError.",
    "errors.UnavailableError": "Use tf.errors.PeerTimeoutError: other processes did not come.",
    "errors": "Use an exception of stratagem.errors, or one of Python's own.",
    # Around training.
    "summary": "Use tf.keras.callbacks.TensorBoard (it needs tensorboard), or tensorboardX.",
    "saved_model": "Use model.save('name.keras') and tf.keras.models.load_model; for serving, "
    "model.export.",
    "profiler": "Use jax.profiler.",
    "train.experimental": "Use tf.keras.optimizers; loss scaling is LossScaleOptimizer.",
    "train.Example": "Use a package such as tfrecord, or store NumPy arrays.",
    "train": "Use tf.keras.optimizers for optimizers, tf.train.Checkpoint for state.",
    "optimizers": "Use tf.keras.optimizers.",
    "layers": "Use tf.keras.layers.",
    "losses": "Use tf.keras.losses.",
    "metrics": "Use tf.keras.metrics.",
    "initializers": "Use tf.keras.initializers.",
    "lite": "Use model.export(format='litert').",
    "quantization": "Use model.quantize.",
    "test": "Use pytest or unittest, and numpy.testing.",
    "random.Generator": "Use keras.random.SeedGenerator, or jax.random with a key.",
    "random.stateless_uniform": "Use jax.random.uniform with jax.random.key(seed).",
    "random.stateless_normal": "Use jax.random.normal with jax.random.key(seed).",
    "random.experimental": "Use keras.random.SeedGenerator, or jax.random with a key.",
    "random": "Use keras.random or jax.random.",
    "linalg.band_part": "Use jax.numpy.triu and tril.",
    "linalg": "Use keras.ops.linalg or jax.numpy.linalg.",
    "signal": "Use keras.ops (fft, stft) or jax.scipy.signal.",
    "nn.conv2d_transpose": "Use keras.ops.conv_transpose.",
    "nn.batch_normalization": "Use keras.ops.batch_normalization.",
    "nn.depthwise_conv2d": "Use keras.ops.depthwise_conv.",
    "nn.ctc_loss": "Use keras.ops.ctc_loss.",
    "nn.experimental": "Use keras.ops or jax.nn.",
    "nn.RNNCellDeviceWrapper": "Use keras.layers.RNN.",
    "debugging": "Use stratagem.debug, or an `if` with an error outside compiled functions.",
    "sysconfig": "Use jax.print_environment_info().",
    "version": "Use stratagem.__name__ and importlib.metadata.version('stratagem').",
}
