"""Marks that SciPy's own tests carry, so that they can be imported under --strict-markers."""


def pytest_configure(config):
    for line in ("thread_unsafe(reason): SciPy's, for tests in parallel threads", "fail_slow(seconds): SciPy's, for long tests"):
        config.addinivalue_line("markers", line)
