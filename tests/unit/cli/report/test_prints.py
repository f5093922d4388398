"""What user code printed, followed: whole lines, few of many, harmless."""

from pathlib import Path

from polyrl_cli.report.prints import MAX_LINES, MAX_READ_BYTES, PrintsTail


def test_whole_lines_from_the_present_end_on(tmp_path: Path) -> None:
    file = tmp_path / "prints.log"
    file.write_text("of an earlier start\n")
    tail = PrintsTail(file)
    assert tail.read() == []
    with file.open("ab") as prints:
        prints.write(b"one\n\x1b[2Jtwo\nthr")
        prints.flush()
        assert tail.read() == ["one", "\\x1b[2Jtwo"]
        assert tail.read() == []
        prints.write(b"ee\n\xff\n")
    assert tail.read() == ["three", "�"]


def test_no_file_yet(tmp_path: Path) -> None:
    tail = PrintsTail(tmp_path / "prints.log")
    assert tail.read() == []
    (tmp_path / "prints.log").write_text("one\n")
    assert tail.read() == ["one"]


def test_of_a_flood_the_newest_lines_are_shown(tmp_path: Path) -> None:
    file = tmp_path / "prints.log"
    tail = PrintsTail(file)
    file.write_text("".join(f"{number}\n" for number in range(1000)))
    shown = tail.read()
    assert shown[0] == f"[… {1000 - MAX_LINES} lines more in {file} …]"
    assert shown[1:] == [str(number) for number in range(1000 - MAX_LINES, 1000)]
    with file.open("a") as prints:
        prints.write("x" * MAX_READ_BYTES + "\nlast\n")
    assert tail.read()[-1] == "last"
    assert tail.read() == []
