"""Ensembles from the posterior, how far they can be trusted, and how they fare against simpler rivals.

found = ensemble(load("model.pwfn"), model, loader, samples=20)
found.probabilities, found.mutual_information, found.disagreement
print("\\n".join(assess(load("model.pwfn"), model, loader, original=original, ood={"noise": noise}).lines()))
"""

from pwfn.evaluate.assess import assess, split_in_half
from pwfn.evaluate.assessment import Assessment, Comparison, Detection, Doubt, Rival, Row
from pwfn.evaluate.calibration import (
    Bin,
    Binning,
    RiskCoverage,
    accuracy,
    auroc,
    brier_score,
    calibration_error,
    false_positive_rate,
    negative_log_likelihood,
    reliability,
    risk_coverage,
)
from pwfn.evaluate.ensemble import Predictions, Score, ensemble, point, with_sigma_scale
from pwfn.evaluate.ood import Outside, open_outside
from pwfn.evaluate.recalibration import Settling, settled_by
from pwfn.evaluate.temperature import fit_temperature, tempered

__all__ = [
    "Assessment",
    "Bin",
    "Binning",
    "Comparison",
    "Detection",
    "Doubt",
    "Outside",
    "Predictions",
    "RiskCoverage",
    "Rival",
    "Row",
    "Score",
    "Settling",
    "accuracy",
    "assess",
    "auroc",
    "brier_score",
    "calibration_error",
    "ensemble",
    "false_positive_rate",
    "fit_temperature",
    "negative_log_likelihood",
    "open_outside",
    "point",
    "reliability",
    "risk_coverage",
    "settled_by",
    "split_in_half",
    "tempered",
    "with_sigma_scale",
]
