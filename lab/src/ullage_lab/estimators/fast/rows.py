"""The features of a job in the form of a data set's row, as `ullage lab data clean` writes them."""

from typing import Any

from ullage.errors import InvalidValue, UllageError
from ullage.jobs.model import Model
from ullage.sandbox.protocol import error_text
from ullage_lab.estimators.fast.features import Features, features


def row_of(configuration: Model) -> dict[str, Any]:
    """Return the row of a configuration, without measured values."""
    try:
        return from_features(features(configuration))
    except UllageError:
        raise
    except Exception as error:
        raise InvalidValue(f"{configuration.name} does not run: {error_text(error)}") from error


def from_features(features: Features) -> dict[str, Any]:
    return {
        **{name: value for name, value in vars(features).items() if name not in ("counts", "inference")},
        "activations_batch": features.activations * features.batch_size,
        **{f"count_{kind}": count for kind, count in features.counts.items()},
        "layers": [{"type": kind, "activations": out, "parameters": own} for kind, out, own in features.layers],
    }
