import pytest

from paceline.errors import TargetError
from paceline.targets.slurm.settings import OPTIONS, SlurmSettings, time_s


def settings(**values: object) -> SlurmSettings:
    return SlurmSettings.of("cluster", values)


def test_every_slurm_setting_is_optional():
    made = settings()
    assert {option.name for option in OPTIONS} == set(made.__dataclass_fields__)
    assert (made.cpus_per_process, made.folder, made.options) == (1, "~/.paceline", ())


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400),
        ("1:30", 90),
        ("2:00:00", 7200),
        ("1-12", 129600),
        ("1-2:3", 93780),
        ("1-0:0:1", 86401),
        ("UNLIMITED", None),
    ],
)
def test_time_limits_are_parsed_like_sbatch(text: str, seconds: float | None):
    assert time_s(text) == seconds
    assert settings(time=text).time_s == seconds


@pytest.mark.parametrize("text", ["1h", "1:2:3:4", "", "1-", "tomorrow"])
def test_invalid_time_is_refused_with_the_valid_forms(text: str):
    with pytest.raises(TargetError, match=r"time=.* is not a time limit of sbatch's.*minutes, 'hours:minutes:seconds'"):
        settings(time=text)


@pytest.mark.parametrize(
    "option", ["--licenses=matlab:1", "--mem-per-cpu=2G", "--time-min=10", "--nice", "--gpus=4", "--x=a b;c"]
)
def test_additional_sbatch_options_of_a_slurm_target_are_accepted_unchanged(option: str):
    assert settings(options=[option]).options == (option,)


@pytest.mark.parametrize(
    ("option", "advice"),
    [
        ("--partition=gpu", "Use the setting partition"),
        ("--part=gpu", "Use the setting partition"),
        ("--mem=4G", "Use the setting memory"),
        ("--job-name=x", "Paceline gives it a value by itself"),
        ("--array=0-3", "Paceline gives it a value by itself"),
        ("--no-requeue", "Paceline gives it a value by itself"),
        ("--sig=USR1", "Paceline gives it a value by itself"),
        ("--ntasks=4", "Paceline gives it a value by itself"),
    ],
)
def test_sbatch_option_that_paceline_sets_is_refused_also_when_abbreviated(option: str, advice: str):
    with pytest.raises(TargetError, match=advice):
        settings(options=[option])


@pytest.mark.parametrize("option", ["-p gpu", "partition=gpu", "--licenses matlab", "--", ""])
def test_sbatch_option_is_refused_unless_it_is_one_word_in_long_form(option: str):
    with pytest.raises(TargetError, match="not a long option of sbatch in one word"):
        settings(options=[option])


@pytest.mark.parametrize(
    "values",
    [{"partition": "a\nb"}, {"options": ["--licenses=a\n#SBATCH --uid=0"]}, {"setup": ["a\nb"]}, {"account": "a\x00b"}],
)
def test_a_line_break_in_a_setting_is_refused(values: dict[str, object]):
    with pytest.raises(TargetError, match="line break or control character"):
        settings(**values)


@pytest.mark.parametrize("value", ["mpirun", "pmix", "pmix_v4"])
def test_mpi_setting_accepts_mpirun_and_the_plugin_names_of_srun(value: str):
    assert settings(mpi=value).mpi == value


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(
            ("login", text)
            for text in ("-oProxyCommand=x", " ", "me@head:2222", "me@a,me@b", "a slots=4", "hosts/cluster")
        ),
        ("partition", " "),
        ("cpus_per_process", 0),
        ("mpi", "pmi2"),
        ("mpi", "pmix --x"),
    ],
)
def test_invalid_setting_value_is_refused(name: str, value: object):
    with pytest.raises(TargetError, match=name):
        settings(**{name: value})
