"""File systems of a Jetson Orin Nano under JetPack 5, 6 and 7, links included."""

import shutil

_ZONES = ("cpu", "gpu", "cv0", "cv1", "cv2", "soc0", "soc1", "soc2", "tj")
TEMPERATURES = dict(zip(_ZONES, (43531, 45750, 46467, 48235, 47732, 49562, 49031, 48343, 50937), strict=True))
#: Rail to millivolts and milliamperes.
RAILS = {"VDD_IN": (5072, 1312), "VDD_CPU_GPU_CV": (5064, 192), "VDD_SOC": (5064, 272)}
STAT = "cpu  26716126 25174 7198445 948399047 900582 0 354519 0 0 0\ncpu0 1 2 3 4 5 6 7 8 9 10\nintr 1 2 3\n"
#: A second later: 1 of 4 ticks was used.
STAT_LATER = "cpu  26716226 25174 7198445 948399347 900582 0 354519 0 0 0\ncpu0 1 2 3 4 5 6 7 8 9 10\nintr 1 2 3\n"
MEMINFO = (
    "MemTotal:        7665664 kB\nMemAvailable:    4200000 kB\nNvMapMemUsed:     524688 kB\n"
    "SwapTotal:       3901440 kB\nSwapFree:        3732480 kB\n"
)
BUDDYINFO = (
    "Node 0, zone      DMA     10     20     30     40     50     60     70     80     90    100     33 \n"
    "Node 0, zone   Normal      1      2      3      4      5      6      7      8      9     10    124 \n"
)
SWAPS = "Filename\t\t\t\tType\t\tSize\t\tUsed\t\tPriority\n"
ZRAM = "/dev/zram{}                              partition\t650240\t\t28160\t\t5\n"
#: JetPack to the board, its software, its power modes and the clocks of its GPU.
MODELS = {
    5: "NVIDIA Jetson Orin Nano Developer Kit",
    6: "NVIDIA Jetson Orin Nano Engineering Reference Developer Kit Super",
    7: "NVIDIA Jetson Orin Nano Engineering Reference Developer Kit Super",
}
RELEASES = {
    5: "# R35 (release), REVISION: 4.1, GCID: 33958178, BOARD: t186ref\n",
    6: "# R36 (release), REVISION: 5.2, GCID: 46426093, BOARD: generic, EABI: aarch64, DATE: Thu Jul 16\n",
    7: (
        "# R39 (release), REVISION: 2.1, GCID: 46758480, BOARD: generic, EABI: aarch64, "
        "DATE: Fri Aug  7 05:54:22 AM UTC 2026\n# KERNEL_VARIANT: oot\nTARGET_USERSPACE_LIB_DIR=nvidia\n"
        "TARGET_USERSPACE_LIB_DIR_PATH=usr/lib/aarch64-linux-gnu/nvidia\n"
    ),
}
KERNELS = {5: "5.10.120-tegra", 6: "5.15.185-tegra", 7: "6.8.12-1021-tegra"}
POWER_MODES = {5: ["15W", "7W"], 6: ["15W", "25W", "MAXN_SUPER", "7W"], 7: ["15W", "25W", "MAXN_SUPER"]}
#: The active mode.
POWER_MODE = {5: 0, 6: 2, 7: 1}
GPU_CLOCKS = {5: (306_000_000, 624_750_000), 6: (306_000_000, 1_020_000_000), 7: (306_000_000, 918_000_000)}
GPU_FREQUENCIES = "306000000 408000000 510000000 612000000 624750000"
SUPER_FREQUENCIES = f"{GPU_FREQUENCIES} 714000000 816000000 918000000 1020000000"


def write(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def link(path, target):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)


def orin_nano(root, jetpack):
    """Write the tree of an Orin Nano, with the names, paths and numbers of a JetPack."""
    old = jetpack == 5
    bus = "sys/devices" if old else "sys/devices/platform/bus@0"
    rails, alarms, fan = {5: (3, 1, 2), 6: (1, 3, 0), 7: (4, 2, 0)}[jetpack]
    _identity(root, jetpack)
    _gpu(root, bus, "17000000.ga10b" if old else "17000000.gpu", jetpack)
    _zones(root, backwards=jetpack == 7, suffix="-therm" if old else "-thermal")
    chip = f"{bus}/c240000.i2c/i2c-1/1-0040/hwmon/hwmon{rails}"
    alarm = f"sys/devices/platform/soctherm-oc-event/hwmon/hwmon{alarms}"
    for number, place in ((rails, chip), (alarms, alarm)):
        link(root / f"sys/class/hwmon/hwmon{number}", f"../../../{place}")
    cap = f"sys/kernel/{'nvpmodel_emc_cap/emc_iso_cap' if old else 'nvpmodel_clk_cap/emc'}"
    write(root / chip, {"name": "ina3221\n", "in7_label": "sum of shunt voltages\n", "in7_input": "9\n"})
    write(root / alarm, {"name": "soctherm_oc\n"})
    write(root / f"sys/class/hwmon/hwmon{fan}", {"name": "pwmfan\n", "pwm1": "60\n"})
    write(root / "sys/class/hwmon/hwmon9", {"name": "pwm_tach\n", "rpm": "1843\n"})
    files = {
        cap: f"{2133 if old else 3199}000000\n",
        "proc/stat": STAT,
        "proc/meminfo": MEMINFO,
        "proc/buddyinfo": BUDDYINFO,
        "proc/swaps": SWAPS + ("" if jetpack == 7 else "".join(ZRAM.format(number) for number in range(6))),
    }
    for channel, (label, (millivolts, milliamperes)) in enumerate(RAILS.items(), 1):
        write(root / chip, {f"in{channel}_label": f"{label}\n", f"in{channel}_input": f"{millivolts}\n"})
        write(root / chip, {f"curr{channel}_input": f"{milliamperes}\n", f"curr{channel}_max": "7784\n"})
    for number, count in ((1, 0), (2, 15), (3, 37)):
        write(root / alarm, {f"oc{number}_event_cnt": f"{count}\n", f"oc{number}_throt_en": "1\n"})
    for policy, kilohertz in ((0, 729600), (4, 1344000)):
        files[f"sys/devices/system/cpu/cpufreq/policy{policy}/scaling_cur_freq"] = f"{kilohertz}\n"
    return write(root, files)


def add_files_for_root(root):
    """Add the files that only root may read: the memory's clock, and 61 per cent of its bandwidth in use."""
    debug = {"bpmp/debug/clk/emc/rate": "2133000000\n", "cactmon/mc_all": f"{61 * 2_133_000}\n"}
    write(root / "sys/kernel/debug", debug)
    return root


def in_container(root, *mounts):
    """Remove the files that Docker hides, except for mounts."""
    shutil.rmtree(root / "sys/firmware")
    shutil.rmtree(root / "sys/kernel/debug", ignore_errors=True)
    for path in ("etc/nv_tegra_release", "etc/nvpmodel.conf", "etc/nv_boot_control.conf", "var/lib/nvpmodel/status"):
        if path not in mounts:
            (root / path).unlink()
    return write(root, {".dockerenv": ""})


def _identity(root, jetpack):
    """Write model, release and power modes, whose names are behind a link."""
    tree = "sys/firmware/devicetree/base"
    board = "" if jetpack == 5 else "nvidia,p3768-0000+p3767-0005-super\0"
    config = f"nvpmodel/nvpmodel_p3767_0003{'' if jetpack == 5 else '_super'}.conf"
    modes = [
        f"< POWER_MODEL ID={id} NAME={name} >\nCPU_ONLINE CORE_0 1\n" for id, name in enumerate(POWER_MODES[jetpack])
    ]
    files = {
        f"{tree}/model": f"{MODELS[jetpack]}\0",
        f"{tree}/compatible": f"{board}nvidia,p3768-0000+p3767-0005\0nvidia,tegra234\0",
        f"etc/{config}": "".join(["# < POWER_MODEL ID=9 NAME=COMMENT >\n", *modes, "< PM_CONFIG DEFAULT=1 >\n"]),
        "etc/nv_tegra_release": RELEASES[jetpack],
        "etc/nv_boot_control.conf": "TNSPEC 3767-300-0005-S.1-1-1-jetson-orin-nano-devkit-super-\n" if board else "",
        "var/lib/nvpmodel/status": f"pmode:{POWER_MODE[jetpack]:04} fmode:fan_mode_quiet\n",
        "proc/sys/kernel/osrelease": f"{KERNELS[jetpack]}\n",
    }
    write(root, files)
    link(root / "proc/device-tree", "../sys/firmware/devicetree/base")
    link(root / "etc/nvpmodel.conf", config)


def _gpu(root, bus, name, jetpack):
    device = f"{bus}/{name}"
    devfreq = f"{device}/devfreq/{name}"
    least, most = GPU_CLOCKS[jetpack]
    files = {
        f"{devfreq}/cur_freq": "306000000\n",
        f"{devfreq}/min_freq": f"{least}\n",
        f"{devfreq}/max_freq": f"{most}\n",
        f"{devfreq}/available_frequencies": f"{GPU_FREQUENCIES if jetpack == 5 else SUPER_FREQUENCIES}\n",
        f"{device}/load": "842\n",
        f"sys/firmware/devicetree/base/{name}/name": f"{'ga10b' if jetpack == 5 else 'gpu'}\0",
    }
    # Other engines have a clock too.
    engines = ("15340000.vic", "15480000.nvdec")
    write(root, files | {f"sys/class/devfreq/{engine}/cur_freq": "115200000\n" for engine in engines})
    link(root / device / "of_node", f"{'../' * (device.count('/'))}firmware/devicetree/base/{name}")
    link(root / devfreq / "device", "../../../" + name)
    link(root / f"sys/class/devfreq/{name}", f"../../../{devfreq}")


def _zones(root, *, backwards, suffix):
    zones = list(TEMPERATURES.items())
    for number, (name, millidegrees) in enumerate(reversed(zones) if backwards else zones):
        zone = f"sys/devices/virtual/thermal/thermal_zone{number}"
        write(root, {f"{zone}/type": f"{name}{suffix}\n", f"{zone}/temp": f"{millidegrees}\n"})
        link(root / f"sys/class/thermal/thermal_zone{number}", f"../../devices/virtual/thermal/thermal_zone{number}")
    devices = {"pwm-fan": 1, "cpufreq-cpu0": 5, "cpu-throttle-alert": 0, "gpu-throttle-alert": 1}
    for number, (name, state) in enumerate(devices.items()):
        device = f"sys/class/thermal/cooling_device{number}"
        write(root, {f"{device}/type": f"{name}\n", f"{device}/cur_state": f"{state}\n"})
