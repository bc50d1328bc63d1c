"""The common part of `horovod.keras` and `horovod.tensorflow.keras`.

    settings         settings of a DistributedOptimizer, and which Keras a script uses: Keras 3 or tf_keras
    reducing         reduction of gradients over the ranks, by TensorFlow or torch, and hooks into Keras 3
    optimizer        DistributedOptimizer, and its mixin for Keras 3's optimizer classes
    keras2           the mixins of DistributedOptimizer for tf_keras's optimizer classes
    callbacks, elastic, module, state   the rest of the interface

This package does not load TensorFlow, torch or Keras before the script does.
"""
