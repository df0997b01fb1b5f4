#!/usr/bin/env python3
"""tracker.py - prints what MLflow finds in file stores, for tracker.sh

    build/peers/mlflow/bin/python tests/train/tracker.py STORE...

Writes a file STORE.txt beside each store. Its lines are

    experiment NAME
    run NAME STATUS, then for each run
        artifacts WHETHER       whether the URI is that of the folder, as MLflow writes it
        times WHETHER           whether the times of start, values and end are in order
        param NAME VALUE
        tag NAME VALUE
        metric NAME STEP VALUE MILLISECONDS
        csv NAME STEP VALUE MICROSECONDS        a line of scalars.csv among the artifacts
        continued WHETHER       whether MLflow could add a value to the run and end it
"""
import csv
import os
import sys

os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"

from mlflow import MlflowClient  # noqa: E402 - reads the environment
from mlflow.artifacts import download_artifacts  # noqa: E402
from mlflow.utils.file_utils import path_to_local_file_uri  # noqa: E402


def show_csv(client, run_id, uri, out):
    """Prints scalars.csv, if the run has it."""
    if "scalars.csv" not in [file.path for file in client.list_artifacts(run_id)]:
        return
    path = download_artifacts(uri + "/scalars.csv")
    with open(path, newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file, strict=True):
            microseconds = row["wall_time"].replace(".", "")
            print("csv", row["tag"], row["step"], repr(float(row["value"])), microseconds, file=out)


def can_continue(client, run_id):
    """Lets MLflow add to a run."""
    client.log_metric(run_id, "train/loss", 0.125, step=1000)
    client.log_param(run_id, "by", "MLflow")
    client.set_terminated(run_id, "KILLED")
    run = client.get_run(run_id)
    last = client.get_metric_history(run_id, "train/loss")[-1]
    return (last.value, last.step, run.data.params["by"], run.info.status) == (
        0.125, 1000, "MLflow", "KILLED")


def in_order(client, info, metrics):
    """Returns whether the times of a run are in order, within a millisecond, to which they are
    rounded. A run that is running has no end."""
    times = [value.timestamp for name in metrics
             for value in client.get_metric_history(info.run_id, name)]
    if (info.end_time is None) != (info.status == "RUNNING"):
        return False
    first, last = min(times, default=info.start_time), max(times, default=info.start_time)
    return info.start_time - 1 <= first and last <= (info.end_time or last) + 1


def show_run(client, store, run, out):
    """Prints a run."""
    info = run.info
    folder = os.path.join(os.path.realpath(store), info.experiment_id, info.run_id, "artifacts")
    print("run", info.run_name, info.status, file=out)
    print("artifacts", info.artifact_uri == path_to_local_file_uri(folder), file=out)
    print("times", in_order(client, info, run.data.metrics), file=out)
    for kind, values in (("param", run.data.params), ("tag", run.data.tags)):
        for name, value in sorted(values.items()):
            print(kind, name, value, file=out)
    for name in sorted(run.data.metrics):
        for value in client.get_metric_history(info.run_id, name):
            print("metric", name, value.step, repr(value.value), value.timestamp, file=out)
    show_csv(client, info.run_id, info.artifact_uri, out)
    print("continued", can_continue(client, info.run_id), file=out)


for folder in sys.argv[1:]:
    mlflow = MlflowClient(path_to_local_file_uri(folder))
    with open(folder + ".txt", "w", encoding="utf-8") as lines:
        for experiment in mlflow.search_experiments():
            print("experiment", experiment.name, file=lines)
            for found in mlflow.search_runs([experiment.experiment_id]):
                show_run(mlflow, folder, found, lines)
