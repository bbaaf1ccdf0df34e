"""Settings of the property tests of this folder."""

from hypothesis import settings

# Time is measured by benchmarks; on a busy machine a deadline only makes tests fail by chance. The
# first call of a compiled loop takes seconds.
settings.register_profile("preprocessing", deadline=None)
settings.load_profile("preprocessing")
