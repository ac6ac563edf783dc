"""What tf.keras.utils has for parameter server training."""

from __future__ import annotations

from stratagem.keras_bridge.on_workers import DatasetCreator as DatasetCreator
from stratagem.utils.sidecar import SidecarEvaluator as SidecarEvaluator
from stratagem.utils.sidecar import SidecarEvaluatorModelExport as SidecarEvaluatorModelExport
