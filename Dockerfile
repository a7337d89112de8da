# Every step also works when typed by hand, in order, in a checkout of the repository.
FROM python:3.11-slim

RUN useradd --create-home researcher
WORKDIR /home/researcher/allattn
RUN chown researcher /home/researcher/allattn
USER researcher
ENV PATH=/home/researcher/.venv/bin:$PATH

RUN python -m venv /home/researcher/.venv
COPY --chown=researcher pyproject.toml README.md LICENSE ./
COPY --chown=researcher allattn ./allattn
RUN pip install --no-cache-dir -e .
COPY --chown=researcher conf ./conf
COPY --chown=researcher train.py prune.py ./

CMD ["python", "train.py", "experiment=demo"]
