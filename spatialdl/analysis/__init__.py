"""Clusters, projections, regressions and neighbours of features whose rows are divided over ranks.

Estimators have scikit-learn's interface, and `comm`, an mpi4py communicator or this package's::

    from mpi4py import MPI
    from spatialdl.analysis import KMeans

    model = KMeans(n_clusters=8, comm=MPI.COMM_WORLD).fit(own_rows)  # each rank its own, or none
    model.cluster_centers_, model.labels_                            # labels of the own rows

Methods that learn or score are called by all ranks; `predict` and `transform` need no other rank.
Instead of arrays they take `Rows`, such as the `FileRows` of feature files.
"""

from spatialdl.analysis.decomposition import PCA, TruncatedSVD
from spatialdl.analysis.kmeans import KMeans
from spatialdl.analysis.neighbours import NearestNeighbors
from spatialdl.analysis.ridge import Ridge, RidgeCV
from spatialdl.analysis.ridge_classes import RidgeClassifierCV
from spatialdl.analysis.rows import ArrayRows, FileRows, Rows

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
