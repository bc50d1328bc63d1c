"""The common part of `horovod.keras` and `horovod.tensorflow.keras`.

    libraries        which Keras a script uses: Keras 3, or the older one, tf_keras
    settings         how a DistributedOptimizer reduces gradients
    reducing         gradients over the ranks, on TensorFlow or on torch
    optimizer        DistributedOptimizer: finds what fits the optimizer that it is given
    keras3, keras2   what it adds to an optimizer of Keras 3, and of tf_keras
    hooks            the places where Keras 3 itself has to know that an optimizer is distributed
    callbacks, learning_rate, elastic, loading, values   the rest of the interface
    arrays           variables and metrics between ranks; knows NumPy alone

Nothing here loads TensorFlow, torch or Keras before the script has asked for it.
"""
