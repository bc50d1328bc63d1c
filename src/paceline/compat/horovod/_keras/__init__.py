"""The common part of `horovod.keras` and `horovod.tensorflow.keras`.

    settings         settings of a DistributedOptimizer, and the Keras of a script: Keras 3 or tf_keras
    reducing         gradients over the ranks, on TensorFlow or on torch, and hooks into Keras 3
    optimizer        DistributedOptimizer, and its class for Keras 3
    keras2           its classes for tf_keras
    callbacks, elastic, module, state   the rest of the interface

Nothing here loads TensorFlow, torch or Keras before the script does.
"""
