"""Settings of all tests."""

from hypothesis import HealthCheck, settings

# No deadline: a slow machine is not a bug.  `make fuzz` takes the longer campaign.
settings.register_profile("ci", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile(
    "campaign", settings.get_profile("ci"), max_examples=2_000, print_blob=True
)
settings.load_profile("ci")
