import dataclasses

import pytest

from bitnet_inference.probe import Sample, Sampler, disturbance, machine_busy_s, median


def test_the_share_of_others():
    assert disturbance(busy_s=4.0, own_s=3.0, wall_s=5.0, num_cpus=2) == pytest.approx(0.1)
    assert disturbance(busy_s=1.0, own_s=1.01, wall_s=1.0, num_cpus=1) == 0  # the clocks differ by a tick
    busy = machine_busy_s()
    assert busy is None or busy > 0


class Played(Sampler):
    """Samples that are given instead of measured."""

    def play(self, *shares):
        self.shares = list(shares)
        return self.measure(lambda: None)

    def _sample(self, work):
        return Sample(seconds=1.0, bandwidth=0.0, int8_peak=0.0, disturbance=self.shares.pop(0))


def test_disturbed_samples_are_measured_again():
    sampler = Played(num_samples=2)
    assert [sample.disturbance for sample in sampler.play(0.9, 0.01, 0.5, 0.02, 0.03)] == [0.01, 0.02]
    assert sampler.num_discarded == 2 and sampler.shares == [0.03]
    assert sampler.summary() == "2 kept, 2 discarded because other processes ran"


def test_where_all_are_disturbed_the_least_are_kept_and_it_says_so():
    sampler = Played(num_samples=1)
    assert [sample.disturbance for sample in sampler.play(0.9, 0.2, 0.3)] == [0.2]
    assert sampler.num_discarded == 2 and "1 of those kept were disturbed too" in sampler.summary()


def test_work_is_repeated_until_it_can_be_timed():
    runs = []
    samples = Sampler(num_samples=1, min_s=0.02).measure(lambda: runs.append(1))
    assert len(runs) > 1 and samples[0].seconds < 0.02 and samples[0].bandwidth == 0
    slow = dataclasses.replace(samples[0], seconds=5.0)
    assert median([slow, slow, samples[0]], lambda sample: sample.seconds) == 5.0
