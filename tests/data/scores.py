#!/usr/bin/env python3
"""scores.py - writes scores.txt: metrics of Ignite and scikit-learn on random data, for
tests/dist/scores.c

    pip install torch pytorch-ignite scikit-learn
    python3 tests/data/scores.py >tests/data/scores.txt

Numbers with a fraction are hexadecimal floats. Each case begins with its word.

    confusion CLASSES N   N labels and N predictions; then lines NAME AVERAGE BETA VALUES. The
                          average "one" is the value of class 1. A line "end".
    top_k CLASSES N       N labels and N rows of scores; then the accuracies for k = 1 .. CLASSES
    errors WIDTH N        N predicted values and N targets, WIDTH per sample; then the mean squared
                          error and the mean absolute error of Ignite, both divided by WIDTH, and
                          the two errors of scikit-learn, in double
    roc N                 N scores and N labels, and the area under the curve

Ignite does not say which of several equal scores it counts. So where scores are equal, the
accuracies come from a stable sort.
"""
import re
import warnings

import ignite
import numpy
import sklearn
import torch
from ignite import metrics
from ignite.metrics.confusion_matrix import cmPrecision, cmRecall
from sklearn.metrics import (fbeta_score, jaccard_score, mean_absolute_error, mean_squared_error,
                             roc_auc_score)

warnings.simplefilter("ignore")
random = numpy.random.default_rng(22)
AVERAGES = ("macro", "micro", "weighted", None)
BETAS = (0.25, 0.5, 1.0, 2.0, 3.5)


def text_of(x):
    """Returns a float in hexadecimal without zeros at the end, and other items as they are."""
    if not isinstance(x, (float, numpy.floating)):
        return x
    return re.sub(r"\.?0+p", "p", float(x).hex())


def show(*items):
    print(*map(text_of, items))


def score(name, average, beta, values):
    values = torch.as_tensor(values, dtype=torch.float64).flatten().tolist()
    show(name, average or "none", float(beta), *values)


def computed(metric, predicted, labels):
    metric.reset()
    metric.update((predicted, labels))
    return metric.compute()


def f_beta(beta, average, predicted, labels):
    precision, recall = metrics.Precision(average=False), metrics.Recall(average=False)
    metric = metrics.Fbeta(beta, average=average, precision=precision, recall=recall)
    for part in (precision, recall):
        computed(part, predicted, labels)
    return metric.compute()


def of_matrix(make, classes, predicted, labels):
    matrix = metrics.ConfusionMatrix(classes)
    metric = make(matrix)
    computed(matrix, predicted, labels)
    return metric.compute()


def confusion(classes, labels, predicted, beta):
    show("confusion", classes, len(labels), *labels, *predicted)
    y = torch.tensor(labels)
    rows = torch.nn.functional.one_hot(torch.tensor(predicted), classes).float()
    for average in AVERAGES:
        score("precision", average, 0, computed(metrics.Precision(average=average), rows, y))
        score("recall", average, 0, computed(metrics.Recall(average=average), rows, y))
    score("precision", "macro", 0, of_matrix(cmPrecision, classes, rows, y))
    score("recall", "macro", 0, of_matrix(cmRecall, classes, rows, y))
    score("iou", "macro", 0, of_matrix(metrics.mIoU, classes, rows, y))
    score("iou", None, 0, of_matrix(metrics.IoU, classes, rows, y))
    score("f_beta", "macro", beta, f_beta(beta, True, rows, y))
    score("f_beta", None, beta, f_beta(beta, False, rows, y))
    of_sklearn = {"labels": range(classes), "zero_division": 0}
    for average in ("micro", "weighted"):
        score("iou", average, 0, jaccard_score(labels, predicted, average=average, **of_sklearn))
        score("f_beta", average, beta,
              fbeta_score(labels, predicted, beta=beta, average=average, **of_sklearn))
    print("end")


def binary(labels, predicted, beta):
    show("confusion", 2, len(labels), *labels, *predicted)
    y, p = torch.tensor(labels), torch.tensor(predicted)
    score("precision", "one", 0, computed(metrics.Precision(), p, y))
    score("recall", "one", 0, computed(metrics.Recall(), p, y))
    score("f_beta", "one", beta, f_beta(beta, False, p, y))
    print("end")


def multi_label(labels, predicted):
    """Writes a case for each label, and a case of all labels together for the micro average."""
    both = [torch.tensor(predicted), torch.tensor(labels)]
    make = {"precision": metrics.Precision, "recall": metrics.Recall}
    each = {name: computed(make[name](is_multilabel=True), *both) for name in make}
    micro = {name: computed(make[name](is_multilabel=True, average="micro"), *both)
             for name in make}
    for k in range(labels.shape[1]):
        show("confusion", 2, len(labels), *labels[:, k], *predicted[:, k])
        for name in make:
            score(name, "one", 0, each[name][k])
        print("end")
    show("confusion", 2, labels.size, *labels.T.flatten(), *predicted.T.flatten())
    for name in make:
        score(name, "one", 0, micro[name])
    print("end")


def top_k(classes, labels, scores, ties):
    order = numpy.argsort(-scores, axis=1, kind="stable")
    accuracies = []
    for k in range(1, classes + 1):
        value = float((order[:, :k] == labels[:, None]).any(axis=1).mean())
        if not ties:
            value = computed(metrics.TopKCategoricalAccuracy(k), torch.tensor(scores),
                             torch.tensor(labels))
        accuracies.append(value)
    show("top_k", classes, len(labels), *labels, *scores.flatten(), *accuracies)


def errors(width, predicted, targets):
    p, t = torch.tensor(predicted), torch.tensor(targets)
    doubles = targets.astype(float).flatten(), predicted.astype(float).flatten()
    show("errors", width, predicted.size, *predicted.flatten(), *targets.flatten(),
         computed(metrics.MeanSquaredError(), p, t) / width,
         computed(metrics.MeanAbsoluteError(), p, t) / width,
         mean_squared_error(*doubles), mean_absolute_error(*doubles))


def roc(scores, labels):
    area = float(computed(metrics.ROC_AUC(), torch.tensor(scores), torch.tensor(labels)))
    assert area == roc_auc_score(labels, scores)
    show("roc", len(labels), *scores, *labels, area)


print(f"# made by scores.py with torch {torch.__version__}, ignite {ignite.__version__},",
      f"scikit-learn {sklearn.__version__}")

# Some classes never occur, or are never predicted.
for i in range(26):
    classes, n = 2 + i % 9, (1, 3, 20, 90, 150)[i % 5]
    chances = random.dirichlet([0.6] * classes, 2)
    labels = random.choice(classes, n, p=chances[0])
    predicted = numpy.where(random.random(n) < 0.6, labels, random.choice(classes, n, p=chances[1]))
    confusion(classes, labels.tolist(), predicted.tolist(), BETAS[i % 5])
for i in range(20):
    labels, predicted = random.random((2, 5 + 3 * i)) < random.random((2, 1))
    binary(labels.astype(int).tolist(), predicted.astype(int).tolist(), BETAS[i % 5])
for i in range(6):
    labels, predicted = random.random((2, 4 + 9 * i, 3 + i % 3)) < random.random(3 + i % 3)
    multi_label(labels.astype(int), predicted.astype(int))
for i in range(44):
    classes, n, ties = 1 + i % 8, 2 + i // 2, i % 2 == 1
    scores = random.standard_normal((n, classes)).astype(numpy.float32)
    if ties:
        scores = numpy.round(scores)
    top_k(classes, random.integers(0, classes, n), scores, ties)
for i in range(24):
    shape = (1 + 3 * i, 1 + i % 4)
    targets = (random.standard_normal(shape) * 10 ** (i % 5 - 2)).astype(numpy.float32)
    noise = random.standard_normal(shape) * random.random()
    predicted = (targets + noise).astype(numpy.float32)
    errors(shape[1], predicted if shape[1] > 1 else predicted[:, 0],
           targets if shape[1] > 1 else targets[:, 0])
for i in range(40):
    n = 4 + 3 * i
    labels = (random.random(n) < random.uniform(0.1, 0.9)).astype(int)
    labels[:2] = 0, 1
    scores = (random.standard_normal(n) + labels * random.random()).astype(numpy.float32)
    if i % 2:
        scores = numpy.round(scores * (i % 3 + 1))
    roc(scores, labels)
