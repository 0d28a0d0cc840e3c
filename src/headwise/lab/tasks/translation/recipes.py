"""Where the files of the published corpora are fetched from: pinned addresses, checksums and sizes.

The checksums of the WMT files are those TensorFlow Datasets has published with their addresses; those of Multi30k
are of the files at the named commit. A file whose checksum nobody published has no recipe.
"""

from headwise.lab.data.downloads import Download

STATMT = "http://www.statmt.org"
WMT = "http://data.statmt.org"
CWMT_SERVER = "ftp://cwmt-wmt:cwmt-wmt@nlp.nju.edu.cn/parallel"
MULTI30K_COMMIT = "a3d2e0d26b56f3846f66a952536ffed4e401d05a"


def _members(*names: str) -> tuple[tuple[str, str], ...]:
    return tuple((name, name.rpartition("/")[2]) for name in names)


MULTI30K = tuple(
    Download(
        f"https://raw.githubusercontent.com/multi30k/dataset/{MULTI30K_COMMIT}/data/task1/raw/{name}.gz", sha256, size
    )
    for name, sha256, size in (
        ("train.de", "726e39b2fa9eb9ffb6dc763fb35a179f80fae06ffc5d28b6ace5faa883de28a6", 637_044),
        ("train.en", "d79cfa999dd4c51d2cb42499b6796d5a882c3a8a961923c25a898c90f8bbd56f", 568_929),
        ("val.de", "f0cba2f995189cf5770f29a8a9a537a3ad3f51657ad873405082ff6863a5e75a", 24_681),
        ("val.en", "14f7d25ddd868909a9213e361768460edcacdd6ab9d1e77b92560dc10c10dc28", 21_650),
        ("test_2016_flickr.de", "9204244e408ccb38d2a55cfcd344df15005fc42a07a6e55ca6c52b6ababb8cc8", 22_890),
        ("test_2016_flickr.en", "611d361c6334bc7246101d48097c13cf5c4413c5befc793cc629934359d532d9", 21_077),
        ("test_2017_flickr.de", "a2c89666db00c495cd8513b9d708d5a3acc205d7de312ef2bf5fb7ebc1540aee", 21_471),
        ("test_2017_flickr.en", "76a444ee25172e72695cddb13ae4a3bda59430617be88e0bb46b60504f054074", 19_138),
        ("test_2017_mscoco.de", "799e4854c25d601cb6cb6be29eabe5667734c61ace2f495e03e429031a0bc338", 10_230),
        ("test_2017_mscoco.en", "aab300bfb4427697987e02cd0aacd44bfe8aa50456231b6474c08038bbed2b58", 8_844),
        ("test_2018_flickr.de", "ddd0130c7d97482dc5197a02141dae8dd79f20f03586c480d675c09a32daf608", 26_461),
        ("test_2018_flickr.en", "ef4f4844037d4c5dea75c9a8ed5fd78905967a26f67c255e230cc9780032654d", 23_514),
    )
)
EUROPARL = Download(
    f"{STATMT}/wmt13/training-parallel-europarl-v7.tgz",
    "0224c7c710c8a063dfd893b0cc0830202d61f4c75c17eb8e31836103d27d96e7",
    657_632_379,
    _members("training/europarl-v7.de-en.de", "training/europarl-v7.de-en.en"),
)
COMMON_CRAWL = Download(
    f"{STATMT}/wmt13/training-parallel-commoncrawl.tgz",
    "c7a74e2ea01ac6c920123108627e35278d4ccb5701e15428ffa34de86fa3a9e5",
    918_311_367,
    _members("commoncrawl.de-en.de", "commoncrawl.de-en.en"),
)
NEWS_COMMENTARY = {
    "v9": Download(
        f"{STATMT}/wmt14/training-parallel-nc-v9.tgz",
        "cb8953f292298e6877ae433c98912b927cb0766b303f4540512ddd286c748485",
        80_418_416,
        _members("training/news-commentary-v9.de-en.de", "training/news-commentary-v9.de-en.en"),
    ),
    "v11": Download(
        f"{WMT}/wmt16/translation-task/training-parallel-nc-v11.tgz",
        "cfe8ab047e05043476e498ee765c98e939c7b7d6d294e856344c84476b619d6a",
        75_178_032,
        _members(
            "training-parallel-nc-v11/news-commentary-v11.de-en.de",
            "training-parallel-nc-v11/news-commentary-v11.de-en.en",
        ),
    ),
    "v12": Download(
        f"{WMT}/wmt17/translation-task/training-parallel-nc-v12.tgz",
        "2b45f30ef1d550d302fd17dd3a5cbe19134ccc4c2cf50c2dae534aee600101a2",
        168_591_139,
        _members("training/news-commentary-v12.zh-en.zh", "training/news-commentary-v12.zh-en.en"),
    ),
}
UNITED_NATIONS = Download(
    "https://storage.googleapis.com/tfds-data/downloads/uncorpus/UNv1.0.en-zh.tar.gz",
    "6f9c6401d5f0a49b20661324570d99fb86822d82f974748a361e19b9b886dd49",
    1_386_685_703,
    _members("en-zh/UNv1.0.en-zh.zh", "en-zh/UNv1.0.en-zh.en"),
)
CWMT = tuple(
    Download(f"{CWMT_SERVER}/{name}.zip", sha256, size, _members(*(f"{name}/{member}" for member in members)))
    for name, sha256, size, members in (
        (
            "casia2015",
            "c939f1528f96c419e9bbffb9caad869616a969e7704ffac896e245a02aff59a9",
            98_159_063,
            ("casia2015_ch.txt", "casia2015_en.txt"),
        ),
        (
            "casict2011",
            "606adc0ccc5d8fc7c47f8589991286616342a1a379a571ce3038918731ae0182",
            166_957_775,
            ("casict-A_ch.txt", "casict-A_en.txt", "casict-B_ch.txt", "casict-B_en.txt"),
        ),
        (
            "casict2015",
            "eef8e25b297c1aff12ab24719247d3588e756d7a4e2c30d4d34fcb4d05ab1050",
            106_836_569,
            ("casict2015_ch.txt", "casict2015_en.txt"),
        ),
        (
            "datum2015",
            "654afce6731485c40ce856514ab80cd2bfd836126bcaf48cdb911ebc32b021a4",
            100_118_018,
            ("datum_ch.txt", "datum_en.txt"),
        ),
        (
            "datum2017",
            "737455c139596f4abf3b1da73bc38932b3ef9534549328eff47d867e29950ed2",
            99_278_067,
            tuple(f"Book{number}_{side}.txt" for number in range(1, 21) for side in ("cn", "en")),
        ),
        (
            "neu2017",
            "9f63020b6990cde85f5387b745e3ae37f1d6a49848b90a49bae28219fb65395f",
            148_681_171,
            ("NEU_cn.txt", "NEU_en.txt"),
        ),
    )
)


def _dev_sets(*names: str) -> Download:
    return Download(
        f"{WMT}/wmt19/translation-task/dev.tgz",
        "7a7deccf82ebb05ba508dba5eb21356492224e8f630ec4f992132b029b4b25e7",
        38_654_961,
        _members(*(f"dev/{name}" for name in names)),
    )


# the German-English files of newstest are the English-German ones with the sides changed over
DEV_SETS = {
    "wmt14": _dev_sets(
        "newstest2013.en", "newstest2013.de", "newstest2014-deen-ref.en.sgm", "newstest2014-deen-src.de.sgm"
    ),
    "wmt16": _dev_sets(
        "newstest2015-deen-ref.en.sgm",
        "newstest2015-deen-src.de.sgm",
        "newstest2016-deen-ref.en.sgm",
        "newstest2016-deen-src.de.sgm",
    ),
    "wmt17": _dev_sets(
        "newsdev2017-zhen-src.zh.sgm",
        "newsdev2017-zhen-ref.en.sgm",
        "newstest2017-zhen-src.zh.sgm",
        "newstest2017-zhen-ref.en.sgm",
    ),
}
