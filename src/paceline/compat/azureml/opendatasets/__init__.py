"""`azureml.opendatasets`: Azure's public data, as far as scikit-learn includes it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from paceline.compat.azureml.exceptions import UserErrorException

if TYPE_CHECKING:
    import pandas

__all__ = ["MNIST", "Diabetes"]


class Diabetes:
    """The diabetes data, from scikit-learn: AGE, SEX, BMI, BP, S1 to S6, Y."""

    @staticmethod
    def get_tabular_dataset(**others: object) -> _Frame:
        """Return the data as an object with `to_pandas_dataframe()`.

        Raises:
            UserErrorException: scikit-learn or pandas is not installed.
        """
        try:
            from sklearn.datasets import load_diabetes  # type: ignore[import-untyped,unused-ignore]

            found = load_diabetes(as_frame=True, scaled=False)
        except ImportError as error:
            raise UserErrorException(
                "the diabetes data needs scikit-learn and pandas: pip install scikit-learn pandas."
            ) from error
        frame = found.frame.rename(columns={"target": "Y", **{name: name.upper() for name in found.feature_names}})
        return _Frame(frame)


class _Frame:
    def __init__(self, frame: pandas.DataFrame) -> None:
        self._frame = frame

    def to_pandas_dataframe(self) -> pandas.DataFrame:
        return self._frame.copy()

    def take(self, count: int) -> _Frame:
        return _Frame(self._frame.head(count))


class _Service:
    """A public dataset of Azure that no library includes. Its constructor raises an error."""

    #: Text of the exception that this class raises. `paceline azureml check` prints this text, too.
    refused = (
        "Azure's open data service is not available here. Download the files from their publisher, and use "
        "Dataset.File.from_files('folder') or Dataset.Tabular.from_delimited_files('folder')."
    )

    def __init__(self, *arguments: object, **named: object) -> None:
        raise UserErrorException(f"{type(self).__name__}: {self.refused}")

    @classmethod
    def get_tabular_dataset(cls, *arguments: object, **named: object) -> NoReturn:
        """Raise UserErrorException: Paceline cannot load this dataset of Azure."""
        raise UserErrorException(f"{cls.__name__}: {cls.refused}")

    get_file_dataset = get_tabular_dataset


class MNIST(_Service):
    """Handwritten digits, which Paceline cannot load."""

    refused = (
        "Download its four .gz files into a folder, and use Dataset.File.from_files('folder'); "
        "scikit-learn's load_digits() needs no download."
    )


def __getattr__(name: str) -> type[_Service]:
    # For any other data set of the SDK, such as NoaaIsdWeather or PublicHolidays, return a class that raises an exception.
    if name.startswith("_") or not name[:1].isupper():
        raise AttributeError(f"module 'azureml.opendatasets' has no attribute {name!r}")
    return type(name, (_Service,), {})
