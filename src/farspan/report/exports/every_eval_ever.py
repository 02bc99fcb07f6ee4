"""Results in the schema of Every Eval Ever, version 0.3.0 (https://evalevalai.com): one JSON file for each model."""

import hashlib
import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any
from uuid import UUID

from farspan.files import write
from farspan.record import by_key
from farspan.report.exports.numbers import Number, is_hub_id, numbers_of, task_settings, text_of
from farspan.report.runs import Source

SCHEMA = "0.3.0"
COLLECTION = "farspan"
METHOD = "farspan: Student's t with a multiplier bootstrap for lengths; Student's t or Wilson's score for means"


def write_every_eval_ever(source: Source, folder: Path) -> list[Path]:
    """Write data/farspan/DEVELOPER/MODEL/UUID.json for each model: the path that the datastore files it under. The UUID
    is a hash of the model and of the time when the run began, so that a run that was continued replaces its file; a
    hash of the content where no time is recorded."""
    began = next((str(one["started"]) for one in source.header["sessions"][:1] if one.get("started")), "")
    paths = []
    for model, numbers in by_key((number.member.model, number) for number in numbers_of(source)).items():
        text = json.dumps(record(source, model, numbers), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
        content = text.encode(errors="backslashreplace")  # as `write` encodes text
        hashed = f"{model} {began}".encode(errors="backslashreplace") if began else content
        name = UUID(bytes=hashlib.sha256(hashed).digest()[:16], version=4)
        developer, _, last = model.partition("/") if is_hub_id(model) else ("local", "", Path(model).name)
        place = folder / "data" / COLLECTION / _portable(developer) / _portable(last)
        place.mkdir(parents=True, exist_ok=True)
        write(place / f"{name}.json", content)
        paths.append(place / f"{name}.json")
    return paths


def record(source: Source, model: str, numbers: Sequence[Number]) -> dict[str, Any]:
    """Return one record of the schema.

    Args:
        numbers: of the model.
    """
    session = source.header["sessions"][-1] if source.header["sessions"] else {}
    about = source.header["models"].get(model, {})
    packages = session.get("packages", {})
    started = str(session.get("started", ""))
    stamp = str(datetime.fromisoformat(started).timestamp()) if started else "0"
    details = {
        key: str(about[key])
        for key in ("revision", "architecture", "parameters", "dtype", "attention", "trained_length", "fingerprint",
                    "tokenizer")
        if about.get(key) is not None
    }  # fmt: skip
    engine = {"name": "transformers", "version": str(packages.get("transformers", "unknown"))}
    is_here = about.get("architecture") is not None  # else a server's, or of imported results
    deployment = "self_deployed" if is_here else "unknown"
    found: dict[str, Any] = {
        "schema_version": SCHEMA,
        "evaluation_id": f"{COLLECTION}/{model}/{stamp}",
        "retrieved_timestamp": stamp,
        "source_metadata": {
            "source_name": "farspan",
            "source_type": "evaluation_run",
            "source_organization_name": "unknown",
            "evaluator_relationship": "other",
        },
        "eval_library": {"name": "farspan", "version": str(packages.get("farspan", "unknown"))}
        | {"additional_details": {key: str(session[key]) for key in ("git", "source") if session.get(key)}},
        "model_info": {
            "name": model,
            "id": model,
            **({"inference_engine": engine} if is_here else {}),
            "additional_details": details | {"deployment_type": deployment, "model_availability": "unknown"},
        },
        "evaluation_results": [_result(number) for number in numbers],
    }
    return found | ({"evaluation_timestamp": stamp} if started else {})


def _result(number: Number) -> dict[str, Any]:
    member, least, largest = number.member, *number.bounds
    settings = {key: str(value) for key, value in task_settings(number).items() if value is not None}
    parameters: dict[str, Any] = {"task_version": number.group.version}
    if number.length is not None:
        parameters |= {"length": number.length, "length_unit": number.group.entry["unit"]}
    score: dict[str, Any] = {"score": number.value, "uncertainty": {"num_samples": number.n}}
    if number.low is not None and number.high is not None:
        ends = {"lower": number.low, "upper": number.high, "confidence_level": 0.95, "method": METHOD}
        score["uncertainty"]["confidence_interval"] = ends
    if (one := number.memory) is not None and (one.censored or one.interval_censored or one.below is not None):
        beyond = {"value_beyond_lengths_measured": one.censored, "upper_beyond": one.interval_censored}
        score["details"] = {key: str(value).lower() for key, value in beyond.items()}
        if one.below is not None:
            score["details"]["value_below"] = f"{one.below:.0f}"
    data_hash = next((settings[key] for key in ("target_hash", "text_hash", "data_hash") if key in settings), None)
    source_data = {"dataset_name": text_of(number), "source_type": "other"}
    return {
        "evaluation_result_id": f"{member.method}/{number.group.spec}/{number.id}",
        "evaluation_name": f"farspan {number.group.title}",
        "source_data": source_data | ({} if data_hash is None else {"additional_details": {"hash": data_hash}}),
        "metric_config": {
            "evaluation_description": number.meaning,
            "metric_id": f"farspan.{number.group.task}.{number.name}",
            "metric_name": number.name.replace("_", " "),
            "metric_kind": number.name,
            "metric_unit": {"share": "proportion"}.get(number.unit, number.unit),
            "metric_parameters": parameters,
            "lower_is_better": not number.higher_is_better,
            "score_type": "continuous",
            "min_score": "-Infinity" if least is None else least,
            "max_score": "Infinity" if largest is None else largest,
        },
        "score_details": score,
        "generation_config": {"additional_details": settings | {"method": member.method}},
    }


def _portable(name: str) -> str:
    """Return a name as a folder can have it on every system."""
    kept = "".join(sign if sign.isalnum() or sign in "-_." else "_" for sign in name).rstrip(". ")
    return kept or "unnamed"
