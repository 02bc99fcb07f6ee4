# farspan on CPUs:
#   docker build -t farspan .
#   docker run --rm -v "$PWD:/work" farspan demo
FROM python:3.12-slim
COPY . /src
RUN sh /src/packaging/install.sh /src
RUN rm -r /src && farspan --version
WORKDIR /work
ENTRYPOINT ["farspan"]
CMD ["--help"]
