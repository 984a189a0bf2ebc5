"""JPEG and PNG images to pixels: as a reference with Pillow and NumPy computes them, and what is refused."""

import base64
import struct
import sys
from contextlib import suppress
from io import BytesIO

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from PIL import Image, ImageOps

from edge.bundles.image import ImagePreprocessor
from edge.errors import BackendError, InvalidRequest
from tests.support import image_model
from tests.support.image_model import encoded, picture, png_chunk

COLOURS = {"colours": "rgb", "mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
STEP = replace(image_model.STEP, size=24, shorter_side=32, max_bytes=400_000, max_pixels=200_000, **COLOURS)


def step(**changes):
    return replace(STEP, **changes)


def reference(image, config):
    """Resize, cut out the middle and normalise as the manifest's format says, on an upright image."""
    image = image.convert("RGB" if config.colours == "rgb" else "L")
    how = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}[config.interpolation]
    size, side = config.size, config.shorter_side or config.size
    if config.resize == "stretch":
        image = image.resize((size, size), how)
    elif config.resize == "letterbox":
        image = image.resize([max(1, int(other * (size / max(image.size)))) for other in image.size], how)
        values = np.zeros((size, size, 3), np.float32) + np.float32(config.mean)
        values[: image.height, : image.width] = np.asarray(image, np.float32) / np.float32(255)
        return ((values - np.float32(config.mean)) / np.float32(config.std)).transpose(2, 0, 1)
    else:
        image = image.resize(tuple(int(side * other / min(image.size)) for other in image.size), how)
        left, top = (round((other - size) / 2) for other in image.size)
        image = image.crop((left, top, left + size, top + size))
    values = np.asarray(image, np.float32).reshape(size, size, -1) / np.float32(255)
    return ((values - np.float32(config.mean)) / np.float32(config.std)).transpose(2, 0, 1)


def pixels(data, config=STEP):
    return ImagePreprocessor(config).read(data, "image")


@pytest.mark.parametrize(
    "config",
    [
        STEP,
        step(interpolation="bicubic", shorter_side=None),
        step(resize="stretch", shorter_side=None),
        step(resize="letterbox", shorter_side=None),
        step(colours="grey", mean=(0.5,), std=(0.25,)),
    ],
    ids=["crop", "bicubic", "stretch", "letterbox", "grey"],
)
@pytest.mark.parametrize("size", [(60, 41), (33, 90), (10, 7), (1, 1), (1, 90)])
def test_pixels_are_those_of_the_reference(config, size):
    for kind in ("PNG", "JPEG"):
        data = encoded(picture(*size), kind)
        made = pixels(data, config)
        assert (made.dtype, made.shape) == (np.float32, (config.channels, 24, 24))
        np.testing.assert_array_equal(made, reference(Image.open(BytesIO(data)), config))


def test_large_jpeg_is_decoded_smaller_with_nearly_the_same_values():
    data = encoded(picture(401, 299), "JPEG", quality=90)
    levels = (
        np.abs(pixels(data) - reference(Image.open(BytesIO(data)), STEP)) * np.float32(STEP.std)[:, None, None] * 255
    )
    assert 0 < levels.mean() < 1
    assert levels.max() < 8


def test_other_modes_become_what_pillow_converts_them_to():
    plain = picture(40, 40)
    opaque = plain.convert("RGBA")
    for image, kind in (
        (plain.convert("L"), "PNG"),
        (plain.convert("1"), "PNG"),
        (plain.quantize(16), "PNG"),
        (opaque, "PNG"),
        (plain.convert("L"), "JPEG"),
        (plain.convert("CMYK"), "JPEG"),
    ):
        data = encoded(image, kind)
        np.testing.assert_array_equal(pixels(data), reference(Image.open(BytesIO(data)), STEP), err_msg=image.mode)


@pytest.mark.parametrize("orientation", range(1, 10))
def test_images_are_turned_upright(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    for kind in ("JPEG", "PNG"):
        data = encoded(picture(60, 44), kind, exif=exif.tobytes())
        upright = ImageOps.exif_transpose(Image.open(BytesIO(data)))
        # A filter of fixed-point weights is not symmetrical to the last bit.
        np.testing.assert_allclose(pixels(data), reference(upright, STEP), atol=1.01 / 255 / min(STEP.std))


def png_header(width, height, bits=8):
    """Return a PNG that ends before its pixels."""
    return (
        b"\x89PNG\r\n\x1a\n"
        + png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, bits, 2, 0, 0, 0))
        + png_chunk(b"IDAT", b"")
    )


def cut_chunk():
    """Return a PNG with a chunk behind its pixels that is too short."""
    data = encoded(picture(40, 40))
    end = data.index(b"IEND") - 4
    return data[:end] + png_chunk(b"gAMA", b"\1") + data[end:]


def transparent():
    image = picture(40, 40).convert("RGBA")
    image.putpixel((3, 3), (0, 0, 0, 254))
    return image


def animated():
    return encoded(picture(40, 40), "PNG", save_all=True, append_images=[picture(40, 40, 1)])


WHOLE = encoded(picture(60, 40), "JPEG")


def with_scans(more):
    """Return a progressive JPEG that repeats its last scan, with bytes behind the image that look like scans."""
    data = encoded(picture(60, 40), "JPEG", progressive=True)
    last = data[data.rindex(b"\xff\xda") : -2]
    return data[:-2] + last * more + data[-2:] + b"\xff\xda" * 200


def with_resources(count):
    """Return a JPEG with metadata of Photoshop, in segments of 5,000 empty resources."""
    resource, made = b"8BIM\4\4" + bytes(6), b""
    for start in range(0, count, 5000):
        data = b"Photoshop 3.0\0" + resource * min(count - start, 5000)
        made += b"\xff\xed" + struct.pack(">H", len(data) + 2) + data
    return WHOLE[:2] + made + WHOLE[2:]


def with_chunks(kind, more):
    """Return a PNG with empty chunks behind its header."""
    data = encoded(picture(20, 10))
    return data[:33] + png_chunk(kind, b"") * more + data[33:]


def exif_of(entries):
    """Return an EXIF of entries that contain nothing, and of an orientation."""
    values = [struct.pack(">HHIHH", 0x9000 + entry, 3, 1, 1, 0) for entry in range(entries - 1)]
    orientation = struct.pack(">HHIHH", 0x0112, 3, 1, 6, 0)
    return b"Exif\0\0MM\0*" + struct.pack(">IH", 8, entries) + b"".join([orientation, *values]) + bytes(4)


def with_entries(entries, kind):
    return encoded(picture(60, 40), kind, exif=exif_of(entries))


def with_profile(entries):
    """Return a PNG that has its EXIF as text, as ImageMagick writes it."""
    data = encoded(picture(60, 40))
    text = b"Raw profile type exif\0\nexif\n  1\n" + exif_of(entries).hex().encode()
    return data[:33] + png_chunk(b"tEXt", text) + data[33:]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (lambda: encoded(picture(40, 40), "GIF"), "got GIF, expected JPEG or PNG. Convert"),
        (lambda: encoded(picture(40, 40), "BMP"), "got BMP, expected JPEG or PNG"),
        (lambda: encoded(picture(40, 40), "TIFF"), "got TIFF, expected JPEG or PNG"),
        (lambda: b"RIFF\x24\0\0\0WEBPVP8 ", "got WebP, expected JPEG or PNG"),
        (lambda: b"\0\0\0\x20ftypavif", "got HEIC or AVIF, expected JPEG or PNG"),
        (lambda: b"<svg xmlns=", "got SVG or XML, expected JPEG or PNG"),
        (lambda: b"picture.png", "got bytes that begin with b'picture.png', expected JPEG or PNG"),
        (
            lambda: base64.b64encode(WHOLE),
            r"got bytes .*, expected JPEG or PNG\. Send base64 in JSON as \{\"b64\": \"…\"\}, or the",
        ),
        (
            lambda: base64.b64encode(encoded(picture(40, 40))),
            r"got bytes .*, expected JPEG or PNG\. Send base64 in JSON as",
        ),
        (lambda: b"", "got no bytes, expected JPEG or PNG"),
        (lambda: WHOLE[:-300], "got image file is truncated .*, expected a complete JPEG. Send the file's bytes"),
        (lambda: encoded(picture(40, 40))[:-99], "got image file is truncated, expected a complete PNG"),
        (cut_chunk, "got .*, expected a complete PNG"),
        (lambda: bytes(400_001), "got 400001 bytes, expected at most 400000. Scale it down, or compress"),
        (lambda: png_header(30_000, 30_000), "got 30000 x 30000 pixels, expected at most 200000 pixels. Scale"),
        (lambda: png_header(1, 199_999), "got 32 x 6399968 pixels after the resize, expected at most 200000 pixels"),
        (lambda: png_header(40, 40, bits=16), "got 16 bits in a channel, expected at most 8. Convert"),
        (lambda: encoded(transparent()), "got transparent pixels, expected an opaque image. Put it on a background"),
        (lambda: with_scans(101), "got .* 101 of them scans, expected .* and 100 scans. Save it again as a usual"),
        (lambda: WHOLE[:2] + b"\xff\xfe\0\2" * 2001 + WHOLE[2:], "got 2001 segments or more, 0 of .* 2000 segments"),
        (lambda: with_resources(10_001), "got more resources of Photoshop, expected at most 10000. Save it again"),
        (lambda: with_chunks(b"iCCP", 256), "got 257 chunks or more, 257 of them .* and 256 without pixels"),
        (lambda: with_chunks(b"IDAT", 32_768), "got 32769 chunks or more, 1 of .*, expected at most 32768 chunks"),
        (lambda: with_entries(1001, "JPEG"), "got 1001 entries of EXIF, expected at most 1000. Save it again"),
        (lambda: with_entries(1001, "PNG"), "got 1001 entries of EXIF, expected at most 1000"),
        (lambda: with_profile(1001), "got 1001 entries of EXIF, expected at most 1000"),
        (animated, "got an animated PNG, expected a single picture. Send one of its frames"),
    ],
)
def test_what_is_refused(data, message):
    with pytest.raises(InvalidRequest, match=f"^image: {message}"):
        pixels(data())


def test_a_usual_number_of_scans_is_decoded():
    assert np.isfinite(pixels(with_scans(80))).all()


@pytest.mark.parametrize("data", [with_entries(1000, "JPEG"), with_entries(1000, "PNG"), with_profile(1000)])
def test_a_usual_number_of_parts_is_read(data):
    upright = picture(60, 40).transpose(Image.Transpose.ROTATE_270)
    np.testing.assert_allclose(pixels(data), reference(upright, STEP), atol=0.8)  # a JPEG loses something


def test_chunks_up_to_the_limit_are_read():
    expected = pixels(encoded(picture(20, 10)))
    for data in (with_chunks(b"prVt", 254), with_chunks(b"IDAT", 32_700)):
        np.testing.assert_array_equal(pixels(data), expected)


def test_errors_name_the_row():
    read = ImagePreprocessor(STEP)
    with pytest.raises(InvalidRequest, match=r"^image in input 'image' row 2: got GIF"):
        read(np.array([[WHOLE], [b"GIF89a"], [WHOLE]], np.object_))
    with pytest.raises(InvalidRequest, match=r"^image in input 'image': got GIF"):
        read(np.array([[b"GIF89a"]], np.object_))


EXIF = Image.Exif()
EXIF[0x0112] = 6
SEEDS = [
    encoded(picture(30, 20), "JPEG", exif=EXIF.tobytes()),
    encoded(picture(30, 20), "JPEG", progressive=True),
    encoded(picture(30, 20).quantize(8), "PNG", exif=EXIF.tobytes()),
    animated(),
]


@pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow's, of metadata that it cannot read
@given(
    st.sampled_from(SEEDS), st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 255)), max_size=6), st.integers(0)
)
@settings(deadline=None, max_examples=300)
def test_broken_files_are_refused_and_nothing_else_is_raised(data, changes, cut):
    broken = bytearray(data)
    for place, value in changes:
        broken[place % len(broken)] = value
    if cut % 3 == 0:
        broken = broken[: cut % len(broken)]
    with suppress(InvalidRequest):
        assert np.isfinite(pixels(bytes(broken))).all()


def test_missing_pillow_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(BackendError, match=r"^pillow: .*expected an importable package. Install the extra 'images'"):
        ImagePreprocessor(STEP)
