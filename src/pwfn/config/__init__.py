"""Settings: declared once, by stage, checked when they are set; four presets; TOML in and out."""

from pwfn.config.checks import Choice, Number, Section, Switch, hint, setting
from pwfn.config.config import METHOD_DEFAULTS, PRESETS, Config, flat
from pwfn.config.sections import (
    PAPER_FRACTIONS,
    WARMUP_EPOCHS,
    FinishConfig,
    FixingConfig,
    LayoutConfig,
    OptimizerName,
    PosteriorConfig,
    Precision,
    Rule,
    ScheduleConfig,
    SchedulerName,
    SigmaInit,
    TargetConfig,
    TrainingConfig,
    UncompressedDtype,
)

__all__ = [
    "METHOD_DEFAULTS",
    "PAPER_FRACTIONS",
    "PRESETS",
    "WARMUP_EPOCHS",
    "Choice",
    "Config",
    "FinishConfig",
    "FixingConfig",
    "LayoutConfig",
    "Number",
    "OptimizerName",
    "PosteriorConfig",
    "Precision",
    "Rule",
    "ScheduleConfig",
    "SchedulerName",
    "Section",
    "SigmaInit",
    "Switch",
    "TargetConfig",
    "TrainingConfig",
    "UncompressedDtype",
    "flat",
    "hint",
    "setting",
]
