"""Distributed k-means, PCA, SVD, ridge regression and nearest neighbours.

Rows are divided over ranks. Estimators have scikit-learn's interface plus `comm`, a communicator of
mpi4py or of this package::

    from mpi4py import MPI
    from spatialdl.inference.analysis import KMeans

    model = KMeans(n_clusters=8, comm=MPI.COMM_WORLD).fit(own_rows)  # may be empty on a rank
    model.cluster_centers_, model.labels_                            # labels of this rank's rows

`fit` and `kneighbors` are collective: all ranks must call them. `predict` and `transform` are
local. Instead of arrays they accept `Rows`, such as the `FileRows` of feature files.
"""

from spatialdl.inference.analysis.components import PCA, TruncatedSVD
from spatialdl.inference.analysis.kmeans import KMeans
from spatialdl.inference.analysis.neighbours import NearestNeighbors
from spatialdl.inference.analysis.ridge import Ridge, RidgeClassifierCV, RidgeCV
from spatialdl.inference.analysis.rows import ArrayRows, FileRows, Rows

__all__ = [
    "PCA",
    "ArrayRows",
    "FileRows",
    "KMeans",
    "NearestNeighbors",
    "Ridge",
    "RidgeCV",
    "RidgeClassifierCV",
    "Rows",
    "TruncatedSVD",
]
