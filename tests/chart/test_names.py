"""Names that Kubernetes would refuse after half of an install."""

import pytest

from tests.chart.conftest import RefusedValuesError


@pytest.mark.parametrize(
    ("release", "values"), [("2024", {}), ("test", {"fullnameOverride": "9queue"})]
)
def test_services_begin_with_a_letter_where_kubernetes_wants_it(helm, release, values):
    """Up to 1.36; a release, a StatefulSet and all else may begin with a digit."""
    with pytest.raises(RefusedValuesError, match="begin with a letter: set fullnameOverride"):
        helm.template(overrides=values, release=release, arguments=["--kube-version", "1.36.2"])
    helm.template(overrides=values, release=release, arguments=["--kube-version", "1.37.0"])
    helm.template(overrides={"fullnameOverride": "queue"}, release=release)
