"""The facts of a job by name in the form of a data set's row, as `ullage lab data clean` writes them."""

from typing import Any

from ullage.errors import InvalidValue, UllageError
from ullage.jobs.model import Model
from ullage.sandbox.protocol import error_text
from ullage_lab.estimators.fast.features import Features, features


def row_of(configuration: Model) -> dict[str, Any]:
    """The row of a configuration, without anything measured."""
    try:
        return from_features(features(configuration))
    except UllageError:
        raise
    except Exception as error:
        raise InvalidValue(f"{configuration.name} does not run: {error_text(error)}") from error


def from_features(found: Features) -> dict[str, Any]:
    return {
        "batch_size": found.batch_size,
        "input_elements": found.input_elements,
        "sequence_length": found.sequence_length,
        "parameters": found.parameters,
        "activations": found.activations,
        "activations_batch": found.activations * found.batch_size,
        "depth": found.depth,
        **{f"count_{kind}": count for kind, count in found.counts.items()},
        "activation_function": found.activation_function,
        "optimizer": found.optimizer,
        "precision": found.precision,
        "trainable": found.trainable,
        "kept_numbers": found.kept_numbers,
        "kept_bytes": found.kept_bytes,
        "norm_numbers": found.norm_numbers,
        "output_elements": found.output_elements,
        "layers": [{"type": kind, "activations": out, "parameters": own} for kind, out, own in found.layers],
    }
