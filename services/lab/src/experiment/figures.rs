//! Figures: one description, drawn as SVG and as PNG.

use std::io::BufWriter;
use std::path::Path;

use anyhow::Context as _;
use plotters::coord::types::RangedCoordf64;
use plotters::prelude::*;

const SIZE: (u32, u32) = (960, 360);
/// Colours that are distinguishable with colour blindness (Okabe and Ito).
const COLOURS: [RGBColor; 6] = [
    RGBColor(0, 114, 178),
    RGBColor(230, 159, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(86, 180, 233),
    RGBColor(213, 94, 0),
];
/// Font family and size in pixels of the labels on the axes.
const LABEL: (&str, u32) = ("sans-serif", 14);
const MARK: RGBColor = RGBColor(190, 30, 45);

/// A line through points.
#[derive(Debug, Clone)]
pub(super) struct Line {
    /// Index of its legend entry and colour; lines of one group share both.
    pub group: usize,
    pub name: String,
    pub points: Vec<(f64, f64)>,
}

/// A bar over a span of time in a row.
#[derive(Debug, Clone, Copy)]
pub(super) struct Bar {
    pub row: usize,
    pub from: f64,
    pub to: f64,
}

/// A figure over time, in seconds.
#[derive(Debug, Clone, Default)]
pub(super) struct Figure {
    pub title: String,
    pub x: String,
    pub y: String,
    pub lines: Vec<Line>,
    /// Horizontal named lines: thresholds.
    pub levels: Vec<(&'static str, f64)>,
    /// Vertical lines: rebindings.
    pub marks: Vec<f64>,
    /// Names of rows in place of numbers on the y axis.
    pub rows: Vec<String>,
    pub bars: Vec<Bar>,
    /// The top of the y axis, if it must not follow the lines.
    pub top: Option<f64>,
}

impl Figure {
    /// Writes `<name>.svg` and `<name>.png`.
    pub fn write(&self, folder: &Path, name: &str) -> anyhow::Result<()> {
        fiec_recorder::report::register_font()?;
        let svg = folder.join(format!("{name}.svg"));
        let mut text = String::new();
        self.draw(SVGBackend::with_string(&mut text, SIZE).into_drawing_area())?;
        std::fs::write(&svg, text).with_context(|| format!("cannot write {}", svg.display()))?;
        let mut pixels = vec![0; (SIZE.0 * SIZE.1 * 3) as usize];
        self.draw(BitMapBackend::with_buffer(&mut pixels, SIZE).into_drawing_area())?;
        write_png(&folder.join(format!("{name}.png")), &pixels)
    }

    fn span(&self) -> (f64, f64) {
        let points = self.lines.iter().flat_map(|l| &l.points);
        let xs = points.clone().map(|p| p.0);
        let right = xs.chain(self.bars.iter().map(|b| b.to)).fold(0.1, f64::max);
        let top = match (self.top, self.rows.len()) {
            (Some(top), _) => top,
            (None, 0) => points.map(|p| p.1).fold(1e-9, f64::max) * 1.05,
            (None, rows) => rows as f64 - 0.4,
        };
        (right, top)
    }

    fn draw<B: DrawingBackend>(
        &self,
        root: DrawingArea<B, plotters::coord::Shift>,
    ) -> anyhow::Result<()> {
        let (right, top) = self.span();
        let bottom = if self.rows.is_empty() { 0.0 } else { -0.6 };
        let failed = |e: DrawingAreaErrorKind<B::ErrorType>| anyhow::anyhow!("figure: {e}");
        root.fill(&WHITE).map_err(failed)?;
        let mut chart = ChartBuilder::on(&root)
            .margin(10)
            .caption(&self.title, ("sans-serif", 16))
            .x_label_area_size(40)
            .y_label_area_size(90)
            .build_cartesian_2d(0.0..right, bottom..top)
            .map_err(failed)?;
        let row = |y: &f64| {
            let at = y.round();
            let whole = (y - at).abs() < 1e-6 && at >= 0.0;
            let name = whole.then(|| self.rows.get(at as usize)).flatten();
            name.cloned().unwrap_or_default()
        };
        let mut mesh = chart.configure_mesh();
        mesh.light_line_style(TRANSPARENT)
            .label_style(LABEL)
            .x_desc(&self.x)
            .y_desc(&self.y);
        if !self.rows.is_empty() {
            mesh.disable_y_mesh()
                .y_labels(self.rows.len())
                .y_label_formatter(&row);
        }
        mesh.draw().map_err(failed)?;
        self.series(&mut chart, right, top).map_err(failed)?;
        root.present().map_err(failed)
    }

    fn series<'a, B: DrawingBackend + 'a>(
        &self,
        chart: &mut ChartContext<'a, B, Cartesian2d<RangedCoordf64, RangedCoordf64>>,
        right: f64,
        top: f64,
    ) -> Result<(), DrawingAreaErrorKind<B::ErrorType>> {
        let colour = |n: usize| COLOURS.get(n % COLOURS.len()).copied().unwrap_or(BLACK);
        chart.draw_series(self.bars.iter().map(|b| {
            let corners = [(b.from, b.row as f64 - 0.3), (b.to, b.row as f64 + 0.3)];
            Rectangle::new(corners, colour(b.row).mix(0.9).filled())
        }))?;
        let mut named = Vec::new();
        for line in &self.lines {
            let style = colour(line.group).stroke_width(2);
            let drawn = chart.draw_series(LineSeries::new(line.points.iter().copied(), style))?;
            if !named.contains(&line.group) {
                named.push(line.group);
                drawn
                    .label(line.name.as_str())
                    .legend(move |(x, y)| PathElement::new([(x, y), (x + 16, y)], style));
            }
        }
        for (name, value) in &self.levels {
            let style = MARK.mix(if *name == "high" { 1.0 } else { 0.5 });
            chart
                .draw_series([PathElement::new([(0.0, *value), (right, *value)], style)])?
                .label(*name)
                .legend(move |(x, y)| PathElement::new([(x, y), (x + 16, y)], style));
        }
        let marks = self.marks.iter().map(|x| {
            let bottom = if self.rows.is_empty() { 0.0 } else { -0.6 };
            PathElement::new([(*x, bottom), (*x, top)], MARK.mix(0.8).stroke_width(1))
        });
        let drawn = chart.draw_series(marks)?;
        if !self.marks.is_empty() {
            drawn
                .label("rebinding")
                .legend(|(x, y)| PathElement::new([(x + 8, y - 5), (x + 8, y + 5)], MARK.mix(0.8)));
        }
        if !self.lines.is_empty() {
            chart
                .configure_series_labels()
                .label_font(LABEL)
                .background_style(WHITE.mix(0.8))
                .border_style(RGBColor(200, 200, 200))
                .position(SeriesLabelPosition::UpperLeft)
                .draw()?;
        }
        Ok(())
    }
}

/// Writes RGB pixels as PNG.
fn write_png(file: &Path, pixels: &[u8]) -> anyhow::Result<()> {
    let cannot = || format!("cannot write {}", file.display());
    let out = BufWriter::new(std::fs::File::create(file).with_context(cannot)?);
    let mut encoder = png::Encoder::new(out, SIZE.0, SIZE.1);
    encoder.set_color(png::ColorType::Rgb);
    encoder.set_depth(png::BitDepth::Eight);
    let mut writer = encoder.write_header().with_context(cannot)?;
    writer.write_image_data(pixels).with_context(cannot)?;
    writer.finish().with_context(cannot)
}
