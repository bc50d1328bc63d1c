"""`azureml.train.dnn`: the estimators of frameworks."""

from paceline.compat.azureml.train.estimator import Chainer, Gloo, Mpi, Nccl, ParameterServer, PyTorch, TensorFlow

__all__ = ["Chainer", "Gloo", "Mpi", "Nccl", "ParameterServer", "PyTorch", "TensorFlow"]
