def test_x(finished):
    import json
    r = finished.report
    print({k: r[k] for k in ("perplexity","kl","top1","router","gates","seconds","calibration")})
    print(finished.folder)
    import shutil; shutil.copytree(finished.folder.parent, "/tmp/fin_dev", dirs_exist_ok=True)
